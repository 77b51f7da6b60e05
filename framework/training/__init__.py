"""Training on one rank. Start with `trainer`: `Trainer.fit` is the loop. `engine` builds what it needs and runs it."""
