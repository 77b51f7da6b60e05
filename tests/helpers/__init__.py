"""What several tests share: running the command, finding processes, guarding against leaks, reading source."""
