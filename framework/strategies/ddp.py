"""torch.nn.parallel.DistributedDataParallel: gradients are averaged over ranks while backward runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.distributed.group import second_group
from framework.errors import ConfigError, TopologyError
from framework.strategies.buffers import broadcast, buffers_of_ranks, restore_buffers
from framework.strategies.hooks import butterfly, find_hook, powersgd_options
from framework.strategies.powersgd import PowerSGD
from framework.strategies.trained import check_dense, check_same_change, trained
from framework.types import Waiting

_NOTHING: AbstractContextManager[Any] = nullcontext()
_UNUSED = re.compile(
    r"Expected to have finished reduction in the prior iteration.*for rank \d+:\s*([\d\s]*\d)", re.DOTALL
)
"""How torch tells parameters that got no gradient: by their place among those to train."""


@final
class DDP:
    """Keywords are DistributedDataParallel's; the process group must exist when `wrap` is called.

    broadcast_buffers: give every rank rank 0's buffers (BatchNorm's statistics) before each forward; false leaves
    each rank its own after the start. comm_hook: what exchanges gradients in place of an all-reduce of their own type,
    one of `framework.strategies.hooks`. sync_batchnorm: BatchNorm takes its statistics over all ranks' samples.

    Torch lays gradients out in buckets anew after the first backward, in the order in which they came; the layout
    decides the order in which values of three or more ranks are added. So that order is part of a checkpoint.
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
        comm_hook: str | Mapping[str, Any] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        if sync_batchnorm:
            _check_sync_batchnorm(context)
        self._context = context
        self._syncs_batchnorm = self.mixes_samples = sync_batchnorm
        self.copies_gradients = not gradient_as_bucket_view
        self._broadcasts_buffers = broadcast_buffers and context.world_size > 1
        # Shared statistics come out alike on all ranks.
        self.buffers_differ = context.world_size > 1 and not broadcast_buffers and not sync_batchnorm
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            **_buffer_option(broadcast_buffers),
        }
        # After how many exchanges torch lays out anew. It keeps its first layout where it looks for unused parameters;
        # of a static graph the first exchange only counts, and the second notes the order.
        self._settled_after = 2 if static_graph else int(not find_unused_parameters)
        options = powersgd_options(comm_hook)
        self._powersgd = None
        if options is not None:
            self._powersgd = PowerSGD(options, context=context, settled_after=self._settled_after, cap_mb=bucket_cap_mb)
        self.gradients_kept = int(self._powersgd is not None and self._powersgd.keeps_errors)
        self.groups: Sequence[dist.ProcessGroup] = ()
        self._comm_hook = find_hook(comm_hook) if isinstance(comm_hook, str) and options is None else None
        # Butterfly and PowerSGD exchange in the midst of backward, SyncBatchNorm of forward too: what a rank computes
        # can't be told from what it waits.
        self._knows_waiting = self._powersgd is None and comm_hook != "butterfly" and not sync_batchnorm
        self._waiting: Waiting | None = None
        self._has_told = True
        self._exchanges = 0
        self._watched = _NOTHING  # around every forward and backward
        self._told = _NOTHING  # around those that exchange
        self._order: list[str] = []  # names of parameters, as their gradients came in the first exchange
        self._hooks: list[RemovableHandle] = []  # on parameters

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for a scaled loss with a hook that goes on with what it has of gradients before."""
        if self._powersgd is not None and precision is Precision.FP16_MIXED:
            raise ConfigError(
                f"trainer.precision={precision.value} scales the loss, by another number at times, and leaves out a "
                "step whose gradients overflow. strategy.comm_hook=powersgd makes each step's gradients with what it "
                "kept of those before: after an overflow they would never be finite again.\n"
                "Use trainer.precision=bf16-mixed, or another strategy.comm_hook."
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Raises ConfigError for a model without parameters to train: there would be nothing to average.

        And where statistics of BatchNorm are to be shared and there is none, and for an embedding that says that its
        gradients are sparse with a hook for dense ones.
        """
        if self._syncs_batchnorm:
            model = _with_sync_batchnorm(model)
        return self._wrapped(model)

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Wrap the same model in a new DistributedDataParallel. PowerSGD starts from scratch, with new buckets."""
        check_same_change(changed, self._context)
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        vars(model).pop("_sync_buffers", None)  # it refers to `model`: that cycle would keep the old buckets alive
        # No synchronisation: weights are equal already, and buffers may be each rank's own.
        wrapped = self._wrapped(self.unwrap(model), init_sync=False)
        if self._waiting is not None:
            self.tell_waiting(wrapped, self._waiting)
        return wrapped

    def _wrapped(self, model: nn.Module, *, init_sync: bool = True) -> nn.Module:
        trained(model, strategy="ddp")
        if self._powersgd is not None or self._comm_hook is butterfly:
            hook = "powersgd" if self._powersgd is not None else "butterfly"
            check_dense(model, strategy=f"ddp with comm_hook={hook}")
        self._exchanges, self._order = 0, []
        wrapped = DistributedDataParallel(model, device_ids=self._device_ids(), init_sync=init_sync, **self._options)
        if self._comm_hook is not None:
            if self._comm_hook is butterfly and not self.groups:
                self.groups = [second_group()]  # see Butterfly
            wrapped.register_comm_hook(next(iter(self.groups), None), self._comm_hook)
        if self._powersgd is not None:
            self._powersgd.register(wrapped)
        if self._settled_after:
            self._note_order(wrapped)
        if not self._options["find_unused_parameters"]:
            self._watched = self._told = _NamesUnused(wrapped)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            module: nn.Module = model.module
            return module
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """ConfigError comes out of it where parameters had no gradient in the step before, and DDP awaited one."""
        # Torch records a static graph in the first backward, which must exchange gradients.
        is_first_of_static = self._options["static_graph"] and not self._exchanges
        if synchronise or is_first_of_static or not isinstance(model, DistributedDataParallel):
            self._exchanges += 1
            self._has_told = False
            return self._told
        both = ExitStack()
        both.enter_context(self._watched)
        both.enter_context(model.no_sync())
        return both

    def tell_waiting(self, model: nn.Module, waiting: Waiting) -> bool:
        """A rank waits from where its own gradients are all there; and for rank 0's buffers, before a forward.

        In a backward that gives the model's last parameter no gradient the former isn't known, which is told at once:
        the step may be the last that is counted together with those before.
        """
        if not self._knows_waiting or not isinstance(model, DistributedDataParallel):
            return False
        self._waiting = waiting
        self._told = _LosesCount(self._watched, self._lose_count)
        last = [parameter for parameter in model.module.parameters() if parameter.requires_grad][-1]
        self._hooks.append(last.register_post_accumulate_grad_hook(self._await_own_gradients))
        if self._broadcasts_buffers and any(True for _ in model.buffers()):
            vars(model)["_sync_buffers"] = partial(_told, model._sync_buffers, waiting)
        return True

    def take_buffers(self, model: nn.Module, *, source: int) -> bool:
        """Give every rank rank `source`'s buffers, where they are kept equal. The first one's come with the step."""
        if self._broadcasts_buffers and source:
            give = partial(broadcast, self.unwrap(model).buffers(), source=source)
            give() if self._waiting is None else _told(give, self._waiting)
        return self._broadcasts_buffers

    def before_evaluation(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (BatchNorm's statistics), which its last forward left different."""
        if self._broadcasts_buffers:
            broadcast(self.unwrap(model).buffers())

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """What decides how sums come out: the order of gradients, what a hook keeps; and each rank's own buffers."""
        exchanges = min(self._exchanges, self._settled_after)
        state: dict[str, Any] = {"gradient_order": list(self._order), "exchanges": exchanges}
        if not self._broadcasts_buffers:
            state["buffers"] = buffers_of_ranks(self.unwrap(model), self._context)
        if self._powersgd is not None:
            state["powersgd"] = self._powersgd.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Have torch lay out the gradients as in the run that is gone on with; give this rank its own buffers back.

        Takes an exchange of the size of the gradients, which are none afterwards; two with a static graph. Buffers of
        another number of ranks are left as they are.
        """
        order = state.get("gradient_order", [])
        if order and isinstance(model, DistributedDataParallel):
            self._exchanges = min(state["exchanges"], self._settled_after)
            for _ in range(self._exchanges):
                with torch.enable_grad():
                    _exchange_in_order(model, order)
            self._order = list(order)
        if self._powersgd is not None and "powersgd" in state:
            self._powersgd.load_state_dict(state["powersgd"])
        if not self._broadcasts_buffers:
            restore_buffers(self.unwrap(model), state.get("buffers", []), self._context)

    def _await_own_gradients(self, _: Tensor) -> None:
        """In a backward: what is queued comes when all gradients are there, in the order in which it was queued. DDP
        queues its waiting for the exchange when the last parameter is done, which is after any hook of one."""
        assert self._waiting is not None
        self._has_told = True
        torch.autograd.Variable._execution_engine.queue_callback(self._waiting.begin_waiting)

    def _lose_count(self) -> None:
        if not self._has_told:
            assert self._waiting is not None
            self._waiting.lose_count()

    def _note_order(self, model: DistributedDataParallel) -> None:
        """Remember the order in which gradients come for the first exchange: one call for each, and none after it."""

        def note(name: str, _: Tensor) -> None:
            if model.require_backward_grad_sync:
                self._order.append(name)
                handles[name].remove()

        handles = {
            name: parameter.register_post_accumulate_grad_hook(partial(note, name))
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
        }
        self._hooks += handles.values()

    def _device_ids(self) -> list[int] | None:
        """Only for a replica that is one GPU: DDP refuses it for a CPU replica and one over several devices."""
        devices = self._context.devices
        if len(devices) != 1 or devices[0].index is None:
            return None
        return [devices[0].index]


@final
class _StandIn(nn.Module):
    """Takes the model's place for one backward, in which gradients come in a given order."""

    def __init__(self, model: nn.Module, order: Sequence[str]) -> None:
        super().__init__()
        self.model = model  # where DDP finds the buffers
        parameters = dict(model.named_parameters())
        self._in_order = [parameters[name] for name in order]

    def forward(self) -> Tensor:
        total = torch.zeros((), device=self._in_order[0].device)
        # Autograd works off what was made last first.
        for parameter in reversed(self._in_order):
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            total = total + values.sum().to(total.device)
        return total


def _exchange_in_order(model: DistributedDataParallel, order: Sequence[str]) -> None:
    """One backward through DDP without the model's own code, data or draws, after which it lays out by `order`."""
    module, compiled = model.module, model._compiled_call_impl
    # Not through a compiled call either: that would decide about the order itself.
    model.module, model._compiled_call_impl = _StandIn(module, order), None
    try:
        model().backward()
    finally:
        model.module, model._compiled_call_impl = module, compiled
        model.zero_grad(set_to_none=True)


def _told(synchronise: Callable[[], None], waiting: Waiting) -> None:
    waiting.begin_waiting()
    synchronise()
    waiting.end_waiting()


@final
class _NamesUnused:
    """Where DDP refuses a forward as parameters had no gradient before, says which, and what to set."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        told = _UNUSED.search(str(error)) if isinstance(error, RuntimeError) else None
        if told is None:
            return
        names = [name for name, parameter in self._model.module.named_parameters() if parameter.requires_grad]
        unused = [names[int(place)] for place in told[1].split() if int(place) < len(names)]
        raise ConfigError(
            f"strategy=ddp awaits a gradient of every parameter, and in the step before {len(unused)} of {len(names)} "
            f"had none: {', '.join(unused)}.\n"
            "Use strategy=ddp strategy.find_unused_parameters=true where the forward leaves out some at times; "
            "requires_grad=False for what is never trained; or strategy=allreduce, which needs no such setting."
        ) from error


@final
class _LosesCount:
    """Around what `watched` is around: asks where that is left without an error. Entered anew for every step."""

    def __init__(self, watched: AbstractContextManager[Any], ask: Callable[[], None]) -> None:
        self._watched = watched
        self._ask = ask

    def __enter__(self) -> None:
        self._watched.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._watched.__exit__(kind, error, trace)
        if kind is None:
            self._ask()


def _check_sync_batchnorm(context: Context) -> None:
    if context.topology.gpus_per_node == 0:
        raise ConfigError(
            "strategy.sync_batchnorm=true needs GPUs: PyTorch's SyncBatchNorm has no way over the CPU.\n"
            "Use strategy.sync_batchnorm=false, or normalise each sample by itself, with torch.nn.GroupNorm for one."
        )
    if len(context.devices) > 1:
        raise TopologyError(
            f"strategy.sync_batchnorm=true is for processes of one GPU each, and these have {len(context.devices)}.\n"
            "Use topology.gpus_per_process=1 topology.min_gpus_per_process=1."
        )


def _with_sync_batchnorm(model: nn.Module) -> nn.Module:
    """With the same parameters and buffers, and the same names of them."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise ConfigError(f"strategy.sync_batchnorm=true: {type(model).__name__} has no BatchNorm. Leave it out.")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def _buffer_option(broadcast: bool) -> dict[str, bool]:
    """The keyword for `broadcast_buffers`; nothing for torch's default, true.

    Newer versions of torch deprecate that name for `forward_sync_buffers`, whose false still makes buffers equal once,
    at the start.
    """
    if broadcast:
        return {}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
