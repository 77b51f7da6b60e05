"""What a rank knows of the others: its place, the process group, and the few collectives used off the step path."""
