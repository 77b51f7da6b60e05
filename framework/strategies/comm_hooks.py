"""Communication hooks of DDP, which exchange a bucket of gradients in place of its all-reduce: `strategy.comm_hook`.

PowerSGD exchanges two thin matrices whose product approximates a matrix of gradients, by torch's own hook. Each rank
adds the error of the approximation to its next gradients. T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD: Practical
Low-Rank Gradient Compression for Distributed Optimization, https://arxiv.org/abs/1905.13727.
"""

# Without `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from framework.distributed.collectives import gather_to_first
from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.strategies.ddp_rules import BF16_HOOK, FP16_HOOK
from framework.strategies.rules import check_one_device

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Send and add gradients in bfloat16, divided by the number of ranks before.

    DDP refuses torch's hook by its own name unless NCCL is built in, although gloo supports this type as well.
    """
    return default_hooks.bf16_compress_hook(group, bucket)


# PowerSGD, which has options and a state, is a class.
HOOKS: dict[str, Hook] = {FP16_HOOK: default_hooks.fp16_compress_hook, BF16_HOOK: bf16}
# Attributes of PowerSGDState that are equal on all ranks, unlike its errors.
_MATRICES = ("p_memory_dict", "q_memory_dict")


@final
class PowerSGD:
    """Torch's PowerSGD hook, with its state in checkpoints.

    Args:
        options: PowerSGDState's, with its names and defaults.
        cap_mb: The size of DDP's buckets, as DDP takes it.

    Raises ConfigError for options that torch refuses, TopologyError for processes of several devices.
    """

    def __init__(self, options: Mapping[str, Any], *, context: Context, cap_mb: float | None) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        try:
            PowerSGDState(None, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"strategy.comm_hook.powersgd={dict(options)}: {error}") from error
        check_one_device(context.topology, option="strategy.comm_hook=powersgd")
        self.keeps_errors = bool(options.get("use_error_feedback", True))
        self._options = dict(options)
        self._context = context
        # What decides the shapes of the state.
        self._fits = {"options": self._options, "bucket_cap_mb": cap_mb}
        self._state: Any = None

    def register(self, model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        def one_bucket_at_a_time(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            future = powerSGD_hook(state, bucket)
            future.wait()
            return future

        hook: Hook = powerSGD_hook
        if self._context.backend == "gloo":
            # The hook's later exchanges are awaited in gloo's two threads, where two buckets would deadlock.
            hook = one_bucket_at_a_time
        self._state = PowerSGDState(None, **self._options)
        model.register_comm_hook(self._state, hook)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the errors of all ranks on rank 0: each as large as the gradients.

        Every rank must call it.
        """
        state = self._state
        _, keys, *position = state.rng.get_state()
        matrices = [_copied(getattr(state, name), "cpu") for name in _MATRICES]
        errors = gather_to_first(_copied(state.error_dict, "cpu"), self._context)
        return {
            "fits": self._fits,
            "iter": state.iter,
            "rng": [torch.from_numpy(keys.astype("int64")), *position],
            "memories": matrices,
            "errors": errors,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore it. With other options, buckets or ranks, only the count of steps and the generator are restored."""
        state = self._state
        context = self._context
        state.iter = saved["iter"]
        keys, *position = saved["rng"]
        state.rng.set_state(("MT19937", keys.numpy().astype("uint32"), *position))

        if saved["fits"] == self._fits and len(saved["errors"]) == context.world_size:
            for name, matrices in zip(_MATRICES, saved["memories"], strict=True):
                setattr(state, name, _copied(matrices, context.device))
            state.error_dict = _copied(saved["errors"][context.rank], context.device)


def _copied(tensors: Mapping[int, Tensor], device: torch.device | str) -> dict[int, Tensor]:
    """Return copies, since the hook changes them in place."""
    return {index: tensor.to(device, copy=True) for index, tensor in tensors.items()}
