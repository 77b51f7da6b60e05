"""Accelerate: a loop of one's own whose parts it has prepared; with DDP where torchrun has started it."""

from __future__ import annotations

from accelerate import Accelerator

from benchmarks.marks import Stopwatch
from benchmarks.peers.work import endless, loader, make, parser


def main() -> None:
    asked = parser(__doc__).parse_args()
    work = make(asked)
    accelerator = Accelerator(cpu=asked.device == "cpu")
    synchronize = None
    if asked.device != "cpu":
        from torch import cuda

        synchronize = cuda.synchronize
    model, optimizer, prepared = accelerator.prepare(work.model, work.optimizer, loader(work, asked))
    batches = endless(prepared)
    stopwatch = Stopwatch(asked.warm_up, asked.steps, seconds=asked.seconds, synchronize=synchronize)
    while not stopwatch.is_done:
        inputs, targets = next(batches)
        accelerator.backward(work.loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        stopwatch.tick()
    accelerator.end_training()


if __name__ == "__main__":
    main()
