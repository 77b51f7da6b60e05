"""The process group and what is exchanged in it off the step path. Start with `context`, then `process_group`."""
