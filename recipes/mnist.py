"""MNIST (LeCun, Cortes and Burges, 1998): 60,000 handwritten digits to train on and 10,000 to test with.

The four files are read as they are offered, packed or not, and unpacked once. Images have one channel of 28×28 pixels.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework import ConfigError, Datasets, Resource, TensorSamples, cached_tensors, local_files, transforms


def _resource(name: str, md5: str, size_bytes: int, *, unpacked_md5: str, unpacked_size_bytes: int) -> Resource:
    return Resource(f"{name}.gz", md5, size_bytes, unpacked=Resource(name, unpacked_md5, unpacked_size_bytes))


RESOURCES = (
    _resource(
        "train-images-idx3-ubyte",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        9_912_422,
        unpacked_md5="6bbc9ace898e44ae57da46a324031adb",
        unpacked_size_bytes=47_040_016,
    ),
    _resource(
        "train-labels-idx1-ubyte",
        "d53e105ee54ea40749a09fcbcd1e9432",
        28_881,
        unpacked_md5="a25bea736e30d166cdddb491f175f624",
        unpacked_size_bytes=60_008,
    ),
    _resource(
        "t10k-images-idx3-ubyte",
        "9fb629c4189551a2d022fa330f9573f3",
        1_648_877,
        unpacked_md5="2646ac647ad5339dbf082846283269ea",
        unpacked_size_bytes=7_840_016,
    ),
    _resource(
        "t10k-labels-idx1-ubyte",
        "ec29112dd5afa0611ce80d1b7f02629c",
        4_542,
        unpacked_md5="27ae3e4e09519cfbb04c329615203637",
        unpacked_size_bytes=10_008,
    ),
)
"""Images and labels of the training part, then of the test part. Names and MD5s are torchvision's."""


def mnist(
    root: str = "data",
    mirrors: Sequence[str] | None = None,
    val_size: int = 5000,
    seed: int = 0,
    mean: float = 0.1307,
    std: float = 0.3081,
    augment: Callable[[Tensor, Any], Tensor] | None = None,
) -> Datasets:
    """Images of shape (1, 28, 28), as (pixel − mean) / std with pixels from 0 to 1, and labels 0–9.

    root: the folder with the files, packed or unpacked, or with MNIST/raw, where torchvision keeps them; missing ones
    are downloaded to the latter. mirrors: where from; None: torchvision's. val_size: images of the 60,000 held out for
    validation, drawn with `seed`; 0: no validation. All parts are rows of the same images, which are kept as bytes and
    normalised in batches; they are mapped from MNIST/decoded, 56 MB that all processes share. augment: of
    framework.transforms, done to the training images before.
    Raises DataError where a file is damaged or can't be had, ConfigError for a `val_size` that leaves nothing to train.
    """
    images, labels, test_images, test_labels = decoded_mnist(root, mirrors)
    if not 0 <= val_size < len(labels):
        raise ConfigError(
            f"data.datasets.val_size={val_size}: must be from 0 to {len(labels) - 1}, a part of the "
            f"{len(labels)} training images."
        )
    normalise = transforms.Normalize(mean, std)
    plain = transforms.Each(normalise)
    augmented = plain if augment is None else transforms.Each(transforms.Compose([augment, normalise]))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    val, train = order[:val_size], order[val_size:]
    return Datasets(
        train=TensorSamples(images, labels, rows=train, transform=augmented),
        val=TensorSamples(images, labels, rows=val, transform=plain) if val_size else None,
        test=TensorSamples(test_images, test_labels, transform=plain),
    )


def decoded_mnist(root: str, mirrors: Sequence[str] | None = None) -> list[Tensor]:
    """Images (N, 1, 28, 28) in bytes and labels (N,) in int64, of the training and of the test part.

    Unpacked once, into <root>/MNIST/decoded; where that can't be written, each time. Raises as `mnist_files` does.
    """

    def make() -> list[Tensor]:
        read = [read_idx(path) for path in mnist_files(root, mirrors)]
        return [each.unsqueeze(1) if each.ndim == 3 else each.long() for each in read]

    key = " ".join(["1", *(resource.md5 for resource in RESOURCES)])
    return cached_tensors(Path(root).expanduser() / "MNIST" / "decoded", "mnist", key=key, make=make)


def mnist_files(root: str, mirrors: Sequence[str] | None = None) -> list[Path]:
    """The files of RESOURCES, packed or unpacked, in their order. Raises DataError as `local_files` does."""
    folder = Path(root).expanduser().absolute()
    return local_files(
        RESOURCES,
        folder=folder / "MNIST" / "raw",
        also_in=[folder],
        mirrors=_torchvisions_mirrors if mirrors is None else lambda: mirrors,
        otherwise="recipe=digits needs none of these files.",
    )


def _torchvisions_mirrors() -> Sequence[str]:
    # Costs more than a second: only who downloads pays it.
    from torchvision.datasets import MNIST

    mirrors: list[str] = MNIST.mirrors
    return mirrors


def read_idx(path: Path) -> Tensor:
    """The bytes of a verified IDX file, packed or unpacked, in their shape: uint8.

    The format: two zeros, the type (8: bytes), the number of dimensions, each dimension's size as four bytes, the data.
    """
    packed = path.read_bytes()
    data = gzip.decompress(packed) if path.suffix == ".gz" else packed
    num_dimensions = data[3]
    ends = [8 + 4 * dimension for dimension in range(num_dimensions)]
    shape = [int.from_bytes(data[end - 4 : end], "big") for end in ends]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=4 + 4 * num_dimensions).view(shape)
