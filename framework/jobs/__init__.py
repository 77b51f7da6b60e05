"""What the command runs: one module or package per job, with `main(request) -> JobResult`; `job=NAME` chooses one.

Start with `train`, then `run_ranks`, which every job that starts ranks uses.
"""
