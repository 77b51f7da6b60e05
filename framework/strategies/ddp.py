"""torch.nn.parallel.DistributedDataParallel: gradients are averaged over ranks while backward runs."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from framework.distributed.context import Context
from framework.errors import ConfigError

_NOTHING: AbstractContextManager[Any] = nullcontext()


@final
class DDP:
    """Keywords are DistributedDataParallel's; the process group must exist when `wrap` is called.

    broadcast_buffers: give every rank rank 0's buffers (BatchNorm's statistics) before each forward; false leaves
    each rank its own after the start.
    """

    def __init__(
        self,
        *,
        context: Context,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
    ) -> None:
        self._context = context
        self._broadcasts_buffers = broadcast_buffers and context.world_size > 1
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            **_buffer_option(broadcast_buffers),
        }

    def wrap(self, model: nn.Module) -> nn.Module:
        """Raises ConfigError for a model without parameters to train: there would be nothing to average."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"strategy=ddp averages gradients, but no parameter of {type(model).__name__} requires one.\n"
                "Set requires_grad on those to train, or use one process: topology.procs_per_node=1."
            )
        return DistributedDataParallel(model, device_ids=self._device_ids(), **self._options)

    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            module: nn.Module = model.module
            return module
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        if synchronise or not isinstance(model, DistributedDataParallel):
            return _NOTHING
        return model.no_sync()

    def before_evaluation(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (BatchNorm's statistics), which its last forward left different."""
        if self._broadcasts_buffers:
            groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for buffer in self.unwrap(model).buffers():
                groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            for buffers in groups.values():
                _broadcast(buffers)

    def _device_ids(self) -> list[int] | None:
        """Only for a replica that is one GPU: DDP refuses it for a CPU replica and one over several devices."""
        devices = self._context.devices
        if len(devices) != 1 or devices[0].index is None:
            return None
        return [devices[0].index]


@torch.no_grad()
def _broadcast(tensors: list[Tensor]) -> None:
    """Rank 0's values to all, in one call: a small collective costs about a millisecond over gloo, however small."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=0)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _buffer_option(broadcast: bool) -> dict[str, bool]:
    """The keyword for `broadcast_buffers`; nothing for torch's default, true.

    Newer versions of torch deprecate that name for `forward_sync_buffers`, whose false still makes buffers equal once,
    at the start.
    """
    if broadcast:
        return {}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
