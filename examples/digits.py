"""A small ResNet on scikit-learn's digits, from two DataLoaders: trained with two processes, resumed, evaluated.

python examples/digits.py
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import framework


class Block(nn.Module):
    """Two convolutions and a shortcut, https://arxiv.org/abs/1512.03385."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.relu(images_BCHW + self.layers(images_BCHW))


class ResNet(nn.Sequential):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            *(Block(width) for _ in range(depth)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )


pixels, digits = load_digits(return_X_y=True)
images_BCHW = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
samples = TensorDataset(images_BCHW, torch.tensor(digits))
train, val, test = random_split(samples, [1257, 180, 360], torch.Generator().manual_seed(0))

run = framework.train(
    model=ResNet(),
    data=(DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=180)),
    task="classification",  # cross entropy and accuracy; for another loss: loss=nn.MSELoss()
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    trainer={"max_epochs": 4, "gpus": 0},
    topology={"procs_per_node": 2},
    checkpoint={"monitor": "val/accuracy", "mode": "max"},
)
print(f"validated: {run.metrics['val/accuracy']:.3f}")

# Two more epochs from the last checkpoint: the same weights as six epochs at once.
run.resume(trainer={"max_epochs": 6})

tested = run.evaluate(DataLoader(test, batch_size=180))
classes = run.predict(DataLoader(test, batch_size=180))["class"]
print(f"tested: {tested['test/accuracy']:.3f}, of the first five digits: {classes[:5].tolist()}")

model = run.best_model()  # a ResNet in this process, on the CPU
print(f"{sum(each.numel() for each in model.parameters()):,} parameters, trained in {run.directory.parent.name}")
