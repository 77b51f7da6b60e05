"""The Python API: `framework.train`, `framework.load` and the runs they return.

Start with `train`, which turns its arguments into overrides (`call`, `nodes`) and runs the command. It returns a `Run`
(`run`), which `recipe` writes as YAML.
"""
