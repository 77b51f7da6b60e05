"""`job=tune`: the largest batch that fits on every rank, and a learning rate to train it with.

`searching`, `dealing`, `suggesting` and `picture` need no torch. `trying` makes steps that no other rank takes part in,
`ranging` those of the whole run, and `running` has the entry.
"""
