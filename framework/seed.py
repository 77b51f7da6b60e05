"""Seeds, and the states of the random generators in plain types that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from framework.errors import CheckpointError


def mix(seed: int, *parts: int | str) -> int:
    """A number in [0, 2**63) for a stream of its own: neighbouring seeds or ranks give unrelated ones.

    The same on every machine and version, unlike `hash`. Parts may be any integers and strings; their order counts.
    """
    plain = [
        part if isinstance(part, str) else int(part) for part in (seed, *parts)
    ]  # NumPy's integers print otherwise
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int, *, rank: int) -> None:
    """Seed Python, NumPy, torch's CPU and all its devices. Ranks get unrelated streams: dropout differs over ranks."""
    mixed = mix(seed, "rank", rank)
    random.seed(mixed)
    torch.manual_seed(mixed)  # also every accelerator, lazily: opens none
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(mixed % 2**32)


def generator_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The states of all generators of this process; `devices` are the ones it owns. Waits for them."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "cpu": torch.get_rng_state(),
        "devices": [
            {"kind": device.type, "state": torch.get_device_module(device).get_rng_state(device)}
            for device in _accelerators(devices)
        ],
    }
    numpy = _numpy()
    if numpy is not None:
        name, words, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        words = torch.from_numpy(words.astype("int64"))
        states["numpy"] = {
            "name": name,
            "words": words,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
    return states


def restore_generator_states(states: dict[str, Any], *, devices: Sequence[torch.device]) -> bool:
    """Set all generators to `states`, bit for bit. Tensors may have been moved; they are read on the CPU.

    Answers whether every generator was restored: devices of another number or kind than saved keep their states, as
    when a GPU run goes on on the CPU. Raises CheckpointError for states of another version of Python or NumPy.
    """
    try:
        _restore_host(states)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"The checkpoint's generator states can't be restored here: {error!r}.") from error
    accelerators = _accelerators(devices)
    saved = states["devices"]
    if [entry["kind"] for entry in saved] != [device.type for device in accelerators]:
        return False
    for device, entry in zip(accelerators, saved, strict=True):
        torch.get_device_module(device).set_rng_state(entry["state"].cpu(), device)
    return True


def set_deterministic(on: bool, *, benchmark: bool | None) -> None:
    """Let torch use only operations that give the same numbers again; those that can't then raise.

    benchmark: let cuDNN try algorithms and keep the fastest, which may differ from run to run; None: unless `on`.
    Call it before the first operation on a GPU: cuBLAS reads its environment variable then.
    """
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Setting it imports the compiler, seconds for nothing where it is so already.
    if on != torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = not on if benchmark is None else benchmark


def fingerprint(devices: Sequence[torch.device]) -> tuple[object, ...]:
    """Of the states of Python's, NumPy's and torch's generators, on the host and these devices: another after any draw.

    Waits for no GPU: CUDA's generator counts on the host what kernels that were queued will draw.
    """
    states = (torch.get_device_module(device).get_rng_state(device) for device in _accelerators(devices))
    return *_host_fingerprint(), *(bytes(state.tolist()) for state in states)


def _host_fingerprint() -> tuple[object, ...]:
    numpy = _numpy()
    drawn: tuple[object, ...] = ()
    if numpy is not None:
        name, words, *rest = numpy.random.get_state(legacy=True)
        drawn = (name, words.tobytes(), *rest)
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), drawn


def _restore_host(states: dict[str, Any]) -> None:
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(states["cpu"].cpu())
    numpy, saved = _numpy(), states.get("numpy")
    if numpy is not None and saved is not None:
        words = saved["words"].cpu().numpy().astype("uint32")
        numpy.random.set_state((saved["name"], words, saved["position"], saved["has_gauss"], saved["gauss"]))


def _accelerators(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type != "cpu"]


def _numpy() -> ModuleType | None:
    """NumPy, or None where it isn't installed. Imported here: what imports it later finds it seeded."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
