"""Lightning Fabric: a loop of one's own, set up by it."""

from __future__ import annotations

from lightning.fabric import Fabric

from benchmarks.marks import Stopwatch
from benchmarks.peers.work import endless, loader, make, parser


def main() -> None:
    asked = parser(__doc__).parse_args()
    work = make(asked)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(work.model, work.optimizer)
    batches = endless(fabric.setup_dataloaders(loader(work, asked)))
    stopwatch = Stopwatch(asked.warm_up, asked.steps)
    for _ in range(stopwatch.last):
        inputs, targets = next(batches)
        fabric.backward(work.loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        stopwatch.tick()


if __name__ == "__main__":
    main()
