"""From datasets to the batches of one rank: one global order per epoch, dealt without a sample lost or repeated."""
