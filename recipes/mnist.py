"""MNIST (LeCun, Cortes and Burges, 1998): 60,000 handwritten digits for training and 10,000 for testing.

torchvision reads and downloads the files. Images have one channel of 28×28 pixels.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from framework import ConfigError, DataError, Datasets, TensorSamples, transforms

LOCK_TIMEOUT_S = 600.0
"""How long to wait for the download of another process."""

SILENCE_TIMEOUT_S = 30.0
"""How long a server may send nothing."""


def mnist(
    root: str = "data",
    mirrors: Sequence[str] | None = None,
    val_size: int = 5000,
    seed: int = 0,
    mean: float = 0.1307,
    std: float = 0.3081,
    augment: Callable[[Tensor, Any], Tensor] | None = None,
) -> Datasets:
    """Return images of shape (1, 28, 28) and labels 0–9. Images are kept as bytes and normalised in batches.

    Args:
        root: Folder with MNIST/raw/, which has the four files or gets them.
        mirrors: Addresses to download from. None means those of torchvision.
        val_size: How many of the 60,000 training images are held out for validation. 0 means no validation.
        seed: Seed of that split.
        mean: Mean of the training pixels, scaled to 0 to 1.
        std: Standard deviation of the same.
        augment: One of framework.transforms, applied to the training images before they are normalised.

    Raises:
        DataError: A file is damaged, or missing and cannot be downloaded.
        ConfigError: `val_size` leaves nothing for training.
    """
    images, labels, test_images, test_labels = read_mnist(root, mirrors)
    if not 0 <= val_size < len(labels):
        raise ConfigError(
            f"data.datasets.val_size={val_size}: must be from 0 to {len(labels) - 1}, a part of the "
            f"{len(labels)} training images."
        )

    # A transform for the images, and none for the labels.
    normalise = transforms.Normalize(mean, std)
    plain = transforms.Each(normalise)
    if augment is None:
        augmented = plain
    else:
        augmented = transforms.Each(transforms.Compose([augment, normalise]))

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    val_rows = order[:val_size]
    train_rows = order[val_size:]

    train = TensorSamples(images, labels, rows=train_rows, transform=augmented)
    val = TensorSamples(images, labels, rows=val_rows, transform=plain)
    test = TensorSamples(test_images, test_labels, transform=plain)
    return Datasets(train, val if val_size > 0 else None, test)


def read_mnist(root: str, mirrors: Sequence[str] | None = None) -> list[Tensor]:
    """Return images (N, 1, 28, 28) as uint8 and labels (N,) as int64, of the training and of the test part.

    If a file is missing or damaged, one process of a node downloads all four and the others wait.
    """
    folder = Path(root).expanduser().absolute() / "MNIST"
    try:
        download_if_needed(folder, mirrors)
        return read_files(folder)
    # job=plan raises this one instead of downloading.
    except DataError:
        raise
    # Whatever torchvision meets: in the network, on the disk, in a file.
    except Exception as error:
        faults = []
        for packed in lacking_files(folder / "raw"):
            state = "damaged" if packed.exists() else "missing"
            faults.append(f"{packed.name} is {state}")
        raise DataError(
            f"In {folder / 'raw'}, {', '.join(faults) or 'a file is damaged'}.\n"
            f"{type(error).__name__}: {str(error).strip()}\n"
            "Put the files there, packed or unpacked, or set data.root to the folder that has them in MNIST/raw, or "
            "data.mirrors=[URL] to where they can be downloaded from. recipe=digits needs none."
        ) from error


def packed_files(raw: Path) -> dict[Path, str]:
    """Return the paths of the four files as they are downloaded, each with its MD5."""
    # Here, because importing it takes a second.
    from torchvision import datasets

    return {raw / name: md5 for name, md5 in datasets.MNIST.resources}


def unpacked_file(packed: Path) -> Path:
    return packed.with_suffix("")


def lacking_files(raw: Path) -> list[Path]:
    """Return the packed files that are missing or damaged, except those that are there unpacked."""
    from torchvision.datasets.utils import check_integrity

    lacking = []
    for packed, md5 in packed_files(raw).items():
        if not unpacked_file(packed).exists() and not check_integrity(packed, md5):
            lacking.append(packed)
    return lacking


def download_if_needed(folder: Path, mirrors: Sequence[str] | None) -> None:
    raw = folder / "raw"
    if not lacking_files(raw):
        return
    # job=plan must not download: it raises a DataError here.
    sys.audit("framework.download", "MNIST", str(raw))

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", timeout=LOCK_TIMEOUT_S):
        # Another process may have downloaded them in the meantime.
        if lacking_files(raw):
            download(folder, mirrors)


def download(folder: Path, mirrors: Sequence[str] | None) -> None:
    """Put the four files into <folder>/raw, packed and unpacked, each when it is complete."""
    from torchvision import datasets

    # torchvision names the folder after the class.
    class MNIST(datasets.MNIST):
        pass

    if mirrors is not None:
        MNIST.mirrors = [f"{mirror.rstrip('/')}/" for mirror in mirrors]

    # torchvision's requests have no time-out of their own.
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_TIMEOUT_S)
    try:
        with TemporaryDirectory(prefix=".download_", dir=folder) as temporary:
            MNIST(temporary, download=True)
            (folder / "raw").mkdir(exist_ok=True)
            for path in Path(temporary, "MNIST", "raw").iterdir():
                path.replace(folder / "raw" / path.name)
    finally:
        socket.setdefaulttimeout(timeout_s)


def read_files(folder: Path) -> list[Tensor]:
    """Return the images and labels of the training part, then those of the test part.

    torchvision reads unpacked files. If one is there only packed, a temporary folder gets all four, which takes half a
    second; `raw` may be read-only.
    """
    from torchvision import datasets
    from torchvision.datasets.utils import extract_archive

    with TemporaryDirectory(prefix="mnist_") as temporary:
        source = folder.parent
        packed_paths = list(packed_files(folder / "raw"))
        if not all(unpacked_file(packed).exists() for packed in packed_paths):
            source = Path(temporary)
            raw = source / "MNIST" / "raw"
            raw.mkdir(parents=True)
            for packed in packed_paths:
                unpacked = unpacked_file(packed)
                if unpacked.exists():
                    (raw / unpacked.name).symlink_to(unpacked)
                else:
                    extract_archive(packed, raw)

        train = datasets.MNIST(source, train=True)
        test = datasets.MNIST(source, train=False)
        # torchvision's images have no channel: (N, 28, 28).
        return [train.data.unsqueeze(1), train.targets, test.data.unsqueeze(1), test.targets]
