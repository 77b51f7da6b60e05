"""The machine and its files: the run directory, hardware, signals and processes, text for people. No torch.

Start with `run_dir`, which has the layout of every run, and `files`, which reads what may be damaged.
"""
