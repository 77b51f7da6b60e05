"""The configuration: its keys (`schema`), what is allowed (`checks`), answers to mistakes. Nothing here imports torch.

Start with `schema`.
"""
