"""A small ResNet on scikit-learn's digits, from two DataLoaders: trained with two processes, resumed, evaluated.

python examples/digits.py
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
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

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))  # (B, C, H, W)


class ResNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.conv(images))  # (B, C, H, W)
        x = x.mean(dim=(2, 3))  # (B, C)
        return self.head(x)  # (B, 10)


pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
samples = TensorDataset(images, torch.tensor(digits))
train, val, test = random_split(samples, [1257, 180, 360], torch.Generator().manual_seed(0))

run = framework.train(
    model=ResNet(),
    data=(DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=180)),
    # Cross entropy and accuracy. For another loss: loss=nn.MSELoss().
    task="classification",
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

# A ResNet in this process, on the CPU.
model = run.best_model()
num_parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"{num_parameters:,} parameters, trained in {run.directory.parent.name}")
