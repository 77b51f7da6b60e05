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

_LOCK_TIMEOUT_S = 600.0  # of other processes' downloads
_SILENCE_S = 30.0  # a server may send nothing


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


def read_mnist(root: str, mirrors: Sequence[str] | None = None) -> list[Tensor]:
    """Return images (N, 1, 28, 28) as uint8 and labels (N,) as int64, of the training and of the test part.

    If a file is missing or damaged, one process of a node downloads all four and the others wait. Packed files are
    unpacked into a temporary folder, which takes half a second.
    """
    from torchvision import datasets  # here, for importing it takes a second
    from torchvision.datasets.utils import check_integrity, extract_archive

    folder = Path(root).expanduser().absolute() / "MNIST"
    raw = folder / "raw"
    md5s = {raw / name: md5 for name, md5 in datasets.MNIST.resources}

    def lacking() -> list[Path]:
        return [path for path, md5 in md5s.items() if not (_unpacked(path).exists() or check_integrity(path, md5))]

    try:
        if lacking():
            sys.audit("framework.download", "MNIST", str(raw))  # job=plan refuses it
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock", timeout=_LOCK_TIMEOUT_S):
                if lacking():  # another process may have downloaded them meanwhile
                    _download(folder, mirrors)
        with TemporaryDirectory(prefix="mnist_") as temporary:
            source = folder.parent
            if not all(_unpacked(path).exists() for path in md5s):
                source = Path(temporary)
                (source / "MNIST" / "raw").mkdir(parents=True)
                for path in md5s:
                    if _unpacked(path).exists():
                        (source / "MNIST" / "raw" / path.stem).symlink_to(_unpacked(path))
                    else:
                        extract_archive(path, source / "MNIST" / "raw")
            parts = [datasets.MNIST(source, train=is_train) for is_train in (True, False)]
        return [tensor for part in parts for tensor in (part.data.unsqueeze(1), part.targets)]
    except DataError:
        raise
    except Exception as error:  # whatever torchvision meets: in the network, on the disk, in a file
        faults = [f"{path.name} is {'damaged' if path.exists() else 'missing'}" for path in lacking()]
        raise DataError(
            f"In {raw}, {', '.join(faults) or 'a file is damaged'}.\n{type(error).__name__}: {str(error).strip()}\n"
            "Put the files there, packed or unpacked, or set data.root to the folder that has them in MNIST/raw, or "
            "data.mirrors=[URL] to where they can be downloaded from. recipe=digits needs none."
        ) from error


def _unpacked(path: Path) -> Path:
    return path.with_suffix("")


def _download(folder: Path, mirrors: Sequence[str] | None) -> None:
    """Put the four files into <folder>/raw, packed and unpacked, each when it is complete."""
    from torchvision import datasets

    # torchvision takes mirrors from the class, and names the folder after it.
    changes = {} if mirrors is None else {"mirrors": [f"{mirror.rstrip('/')}/" for mirror in mirrors]}
    MNIST = type("MNIST", (datasets.MNIST,), changes)
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE_S)  # torchvision's requests have none
    try:
        with TemporaryDirectory(prefix=".download_", dir=folder) as temporary:
            MNIST(temporary, download=True)
            (folder / "raw").mkdir(exist_ok=True)
            for path in Path(temporary, "MNIST", "raw").iterdir():
                path.replace(folder / "raw" / path.name)
    finally:
        socket.setdefaulttimeout(timeout_s)
