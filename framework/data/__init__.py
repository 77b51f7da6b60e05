"""From datasets to the batches of one rank. Start with `sampler` (the global order), then `loader`."""
