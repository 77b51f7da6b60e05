"""From datasets to the batches of one rank. Start with `loader`; `order` is the sample order, `batching` batch sizes.

`resident` (tensors in memory), `workers` (torch's DataLoader) or `stream` (an IterableDataset) load a batch; `prefetch`
moves it to the device. `keyed_random`, `sample_check` and `identity` make the same run see the same data again.
"""
