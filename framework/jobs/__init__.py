"""What the command does: one class per job, in a file or a folder. All are subclasses of `framework.command.job.Job`.

Start with `eval`, a small one, and `train`. To add a job: one class here, its section in `conf/config.yaml` and
`framework.config.schema`, and one line in `framework.config.jobs`.
"""
