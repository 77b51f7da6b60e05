"""The framework called from Python: `framework.train`, `framework.load` and the runs they return.

Start with `train`: it turns its arguments into the overrides of a command (`nodes`) and runs that. `run` has what a
finished run offers.
"""
