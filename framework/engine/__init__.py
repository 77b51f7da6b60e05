"""One rank of a run: set it up, build and assemble its parts, restore a checkpoint, train. Start with `train`."""
