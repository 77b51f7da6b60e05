"""What a rank knows of the others: its place (`context`), the process group, and the few collectives used off the path."""
