"""The machine and its files: the run directory, hardware, processes, whole writes. Start with `run_dir`."""
