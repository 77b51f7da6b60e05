"""What the command can do: one module per job, each with `main(request) -> int`, chosen with `job=NAME`."""
