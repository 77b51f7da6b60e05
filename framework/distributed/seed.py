"""Seeds, and the states of the random generators in plain types that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from framework.errors import CheckpointError


def mix(seed: int, *parts: int | str) -> int:
    """Return a number in [0, 2**63) to seed one stream: neighbouring seeds or ranks give unrelated ones.

    Unlike `hash` it is the same on every machine and version. Parts may be any integers and strings; order counts.
    """
    # NumPy's integers print differently, so they become Python's.
    plain: list[int | str] = [int(seed)]
    for part in parts:
        plain.append(part if isinstance(part, str) else int(part))
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int, *, rank: int) -> None:
    """Seed Python, NumPy, torch's CPU and all its devices. Ranks get unrelated streams: dropout differs over ranks."""
    mixed = mix(seed, "rank", rank)
    seed_generators(mixed)
    # This seeds every accelerator too, when it is first used: it opens none.
    torch.manual_seed(mixed)


def seed_generators(seed: int) -> None:
    """Seed what a transform may draw from: the generators of Python, NumPy, and torch on the CPU."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators that `seed_generators` seeds afterwards."""
    python = random.getstate()
    pytorch = torch.get_rng_state()
    of_numpy = numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(pytorch)
        numpy.random.set_state(of_numpy)


def generator_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of all generators of this process, which owns `devices`. Waits for them."""
    version, words, gauss = random.getstate()
    of_numpy: Any = numpy.random.get_state(legacy=True)
    name, numpy_words, position, has_gauss, numpy_gauss = of_numpy
    on_devices = []
    for device in _accelerators(devices):
        state = torch.get_device_module(device).get_rng_state(device)
        on_devices.append({"kind": device.type, "state": state})
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "words": torch.from_numpy(numpy_words.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(numpy_gauss),
        },
        "cpu": torch.get_rng_state(),
        "devices": on_devices,
    }


def restore_generator_states(states: dict[str, Any], *, devices: Sequence[torch.device]) -> bool:
    """Set all generators to `states`, bit for bit; the tensors may be on any device.

    Return False if there are other devices than when it was saved, as when a GPU run resumes on the CPU: they keep the
    states that they have. Raises CheckpointError for states of another version of Python or NumPy.
    """
    try:
        python = states["python"]
        of_numpy = states["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(states["cpu"].cpu())
        numpy_words = of_numpy["words"].cpu().numpy().astype("uint32")
        numpy.random.set_state(
            (of_numpy["name"], numpy_words, of_numpy["position"], of_numpy["has_gauss"], of_numpy["gauss"])
        )
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"The checkpoint's generator states can't be restored here: {error!r}.") from error

    accelerators = _accelerators(devices)
    saved = states["devices"]
    saved_kinds = [entry["kind"] for entry in saved]
    if saved_kinds != [device.type for device in accelerators]:
        return False
    for device, entry in zip(accelerators, saved, strict=True):
        torch.get_device_module(device).set_rng_state(entry["state"].cpu(), device)
    return True


def fingerprint(devices: Sequence[torch.device]) -> tuple[object, ...]:
    """Return a value that any draw from Python, NumPy or torch, on the host and these devices, changes.

    Waits for no GPU: CUDA's generator counts on the host what queued kernels will draw.
    """
    of_numpy: Any = numpy.random.get_state(legacy=True)
    _, words, *numpy_numbers = of_numpy
    torch_states = [torch.get_rng_state()]
    torch_states += [torch.get_device_module(device).get_rng_state(device) for device in _accelerators(devices)]
    torch_bytes = [state.numpy().tobytes() for state in torch_states]
    return random.getstate(), words.tobytes(), *numpy_numbers, *torch_bytes


def set_deterministic(on: bool, *, benchmark: bool | None) -> None:
    """Let torch use only operations that repeat their numbers; those that can't then raise.

    Call it before the first operation on a GPU, when cuBLAS reads its environment variable.

    Args:
        benchmark: Let cuDNN try algorithms and keep the fastest, which may differ from run to run. None: unless `on`.
    """
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Setting it imports the compiler, which takes seconds.
    if on != torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    if benchmark is None:
        benchmark = not on
    torch.backends.cudnn.benchmark = benchmark


def _accelerators(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type != "cpu"]
