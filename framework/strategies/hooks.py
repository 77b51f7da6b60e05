"""What DDP does with a bucket of gradients in place of its own all-reduce: `strategy.comm_hook` chooses one."""

# Without `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.butterfly import MEAN, butterfly_all_reduce
from framework.errors import ConfigError

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def fp16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Gradients are divided by the number of ranks, sent and added in float16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.fp16_compress_hook(state, bucket)


def bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Gradients are divided by the number of ranks, sent and added in bfloat16.

    Torch lets its hook be registered by its own name only where NCCL is built in; gloo adds this type as well.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(state, bucket)


def butterfly(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over ranks by `framework.distributed.butterfly` in `group`; backward goes on when it is done."""
    values = bucket.buffer()
    butterfly_all_reduce(values, op=MEAN, group=group)
    is_behind = values.device.type != "cpu"
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[values.device] if is_behind else None)
    done.set_result(values)
    return done


_HOOKS: dict[str, Hook] = {"fp16": fp16, "bf16": bf16, "butterfly": butterfly}
POWERSGD = "powersgd"  # which keeps more than fits into a function


def find_hook(name: str) -> Hook:
    """The hook of this name. Raises ConfigError for another."""
    if name not in _HOOKS:
        there = ", ".join((*_HOOKS, POWERSGD))
        raise ConfigError(f"strategy.comm_hook={name}: there is none. Use one of {there}, or null.")
    return _HOOKS[name]


def powersgd_options(chosen: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Those of `powersgd`, which may be given by its name or as `{powersgd: {option: value}}`; None for other hooks."""
    if isinstance(chosen, str) or chosen is None:
        return {} if chosen == POWERSGD else None
    if list(chosen) != [POWERSGD]:
        raise ConfigError(
            f"strategy.comm_hook={dict(chosen)}: only {POWERSGD} has options, as in "
            "'strategy.comm_hook={powersgd:{matrix_approximation_rank:2}}'."
        )
    return dict(chosen[POWERSGD] or {})
