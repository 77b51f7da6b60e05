"""What the command can do: one module per job, each with `main(request) -> JobResult`, chosen with `job=NAME`."""
