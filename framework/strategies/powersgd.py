"""PowerSGD: of a matrix of gradients two thin ones are exchanged, whose product is near it; torch's own hook.

What they leave out is kept on each rank and added to its next gradients. T. Vogels, S. P. Karimireddy, M. Jaggi,
PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, https://arxiv.org/abs/1905.13727.
"""

# Without `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from framework.distributed.context import Context
from framework.errors import ConfigError, TopologyError

OPTIONS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "batch_tensors_with_same_shape",
)
_START, _USUAL_START = "start_powerSGD_iter", 1000
_MEMORIES = ("p_memory_dict", "q_memory_dict")  # the same on every rank, unlike the errors


@final
class PowerSGD:
    """The hook and what it keeps. options: torch's PowerSGDState's, by its names and with its defaults.

    settled_after: how many exchanges pass before DDP's buckets stay; cap_mb: of their size. Raises ConfigError for an
    option that there isn't and a start before the buckets stay, TopologyError for processes of several devices.
    """

    def __init__(self, options: Mapping[str, Any], *, context: Context, settled_after: int, cap_mb: float) -> None:
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise ConfigError(
                f"strategy.comm_hook.powersgd has no option {', '.join(unknown)}. It takes {', '.join(OPTIONS)}."
            )
        earliest = max(2, settled_after + 1)
        if not options.get(_START, _USUAL_START) >= earliest:
            raise ConfigError(
                f"strategy.comm_hook.powersgd.{_START}={options[_START]} must be {earliest} or more: until then "
                "PyTorch lays gradients out anew."
            )
        if len(context.devices) > 1:
            raise TopologyError(
                f"strategy.comm_hook=powersgd is for processes of one device each, and these have "
                f"{len(context.devices)}.\nUse topology.gpus_per_process=1 topology.min_gpus_per_process=1."
            )
        self.keeps_errors = bool(options.get("use_error_feedback", True))
        self._options = dict(options)
        self._context = context
        self._fits = {"options": self._options, "bucket_cap_mb": cap_mb}  # what the sizes of the memories hang on
        self._state: Any = None

    def register(self, model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        def one_after_another(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            # Its later exchanges are awaited in gloo's two threads, where two buckets would wait for each other.
            future = powerSGD_hook(state, bucket)
            future.wait()
            return future

        self._state = PowerSGDState(None, **self._options)
        model.register_comm_hook(self._state, one_after_another if self._context.backend == "gloo" else powerSGD_hook)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, with the errors of all ranks on rank 0, which is as much as its gradients times theirs.

        Every rank must call it.
        """
        state = self._state
        _, keys, *place = state.rng.get_state()
        return {
            "fits": self._fits,
            "iter": state.iter,
            "rng": [torch.from_numpy(keys.astype("int64")), *place],
            "memories": [_copied(getattr(state, name), "cpu") for name in _MEMORIES],
            "errors": self._errors_of_ranks(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there. On another number of ranks each begins with the mean of the errors: it adds as much.

        With other options or other buckets there is nothing to go on from but the count of steps.
        """
        state, context = self._state, self._context
        state.iter = saved["iter"]
        keys, *place = saved["rng"]
        state.rng.set_state(("MT19937", keys.numpy().astype("uint32"), *place))
        if saved["fits"] != self._fits:
            return
        for name, memory in zip(_MEMORIES, saved["memories"], strict=True):
            setattr(state, name, _copied(memory, context.device))
        errors = saved["errors"]
        if len(errors) == context.world_size:
            state.error_dict = _copied(errors[context.rank], context.device)
        else:
            means = {index: torch.stack([each[index] for each in errors]).mean(dim=0) for index in errors[0]}
            state.error_dict = _copied(means, context.device)

    def _errors_of_ranks(self) -> list[dict[int, Tensor]]:
        mine = _copied(self._state.error_dict, "cpu")
        if self._context.world_size == 1:
            return [mine]
        given: list[Any] | None = [None] * self._context.world_size if self._context.is_main else None
        dist.gather_object(mine, given)
        return given or []


def _copied(tensors: Mapping[int, Tensor], device: torch.device | str) -> dict[int, Tensor]:
    """Not shared: the hook works on them in place."""
    return {index: tensor.to(device, copy=True) for index, tensor in tensors.items()}
