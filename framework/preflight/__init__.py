"""Whether the ranks of a run can really talk, and how fast: values are checked, exchanges timed, clocks compared.

`arithmetic`, `assessing` and `wording` need no torch. `running` has the entry of `job=preflight`, and what precedes a
training with `preflight=true`.
"""
