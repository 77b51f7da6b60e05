"""The configuration: its keys, what is allowed, and answers to mistakes. Nothing here imports torch.

Start with `schema`, which has every key. `parse` turns what Hydra composed into it, and `checks` has the rules between
keys. `saved` writes and reads a run's configuration; `targets` imports what `_target_` names.
"""
