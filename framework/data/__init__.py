"""From datasets to the batches of one rank. Start with `loader`; `order` is the sample order, `batching` batch sizes.

A batch is loaded by `resident` (tensors in memory) or by `workers` (torch's DataLoader) and `batch_dataset`, or read by
`stream`; `prefetch` moves it to the device. `keyed_random`, `sample_check` and `identity` make that exactly repeatable.
"""
