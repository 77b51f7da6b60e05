"""Start ranks: on one node, on several, in this process, or as torchrun, srun or Kubernetes has started them.

Start with `local`; `plan` is what every launcher is given and returns.
"""
