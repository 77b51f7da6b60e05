"""torch.nn.parallel.DistributedDataParallel: gradients are averaged over ranks while backward runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.errors import ConfigError, TargetError
from framework.strategies.averaging import SyncedBuffers, broadcast
from framework.strategies.base import Single, StrategyCosts
from framework.strategies.comm_hooks import HOOKS, PowerSGD
from framework.strategies.ddp_rules import (
    POWERSGD,
    AutoRules,
    DDPRules,
    check_powersgd_precision,
    check_sync_batchnorm,
    parse_comm_hook,
)
from framework.strategies.parameters import check_dense, check_same_change, trained
from framework.types import Waiting

# Torch identifies parameters without a gradient by their index among the trained ones.
_UNUSED = re.compile(
    r"Expected to have finished reduction in the prior iteration.*for rank \d+:\s*([\d\s]*\d)", re.DOTALL
)


class DDP(SyncedBuffers):
    """Average gradients by DistributedDataParallel, while the backward runs. The keywords are its own, except:

    Args:
        broadcast_buffers: Give all ranks rank 0's buffers (BatchNorm's statistics) before the first forward of a step;
            false leaves each rank its own after the start.
        comm_hook: What exchanges gradients in place of an all-reduce of their own type, from
            `framework.strategies.comm_hooks`.
        sync_batchnorm: Compute BatchNorm's statistics over the samples of all ranks.

    DDP rebuilds its buckets after the first backward, in the order in which the gradients came. The buckets decide the
    order in which values of three or more ranks are added, so that order is part of a checkpoint.
    """

    rules = DDPRules

    def __init__(
        self,
        *,
        context: Context,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        comm_hook: str | Mapping[str, Any] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(context, broadcast_buffers=broadcast_buffers)
        self.mixes_samples = sync_batchnorm
        check_sync_batchnorm(sync_batchnorm, context.topology)
        if sync_batchnorm:
            # Statistics over all samples are the same on all ranks.
            self.buffers_differ = False
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        # Buffers are broadcast by `accumulate`. Newer versions of torch deprecate the second name.
        ddp_keywords = inspect.signature(DistributedDataParallel.__init__).parameters
        if "forward_sync_buffers" in ddp_keywords:
            self._options["forward_sync_buffers"] = False
        else:
            self._options["broadcast_buffers"] = False
        # After how many exchanges DDP rebuilds its buckets; 0 for never.
        self._rebuilt_after = 1
        if static_graph:
            # The first exchange only counts gradients, and the second notes their order.
            self._rebuilt_after = 2
        elif find_unused_parameters:
            self._rebuilt_after = 0
        self._hook, hook_options = parse_comm_hook(comm_hook)
        self._powersgd = None
        if self._hook == POWERSGD:
            self._powersgd = PowerSGD(hook_options, context=context, cap_mb=bucket_cap_mb)
        # If gradients are exchanged in this backward, and no hook has reported yet when waiting for them begins.
        self._waiting_is_unreported = False
        # Exchanges of gradients so far, since the model was wrapped or a checkpoint was loaded.
        self._exchanges = 0
        # Names of parameters, as their gradients came in the first exchange.
        self._order: list[str] = []
        # To remove the hooks on parameters.
        self._handles: list[RemovableHandle] = []

    def costs(self) -> StrategyCosts:
        keeps_errors = self._powersgd is not None and self._powersgd.keeps_errors
        copies_gradients = not self._options["gradient_as_bucket_view"]
        return StrategyCosts(copies_gradients=copies_gradients, gradients_kept=int(keeps_errors))

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for a scaled loss with a hook that keeps errors of earlier gradients."""
        check_powersgd_precision(self._hook, precision)

    def allow_unused_parameters(self) -> None:
        """Look for unused parameters. Raises ConfigError for a static graph."""
        if self._options["static_graph"]:
            raise ConfigError(
                "strategy.static_graph=true can't go with a task that has objectives: each uses other parameters.\n"
                "Use strategy.static_graph=false."
            )
        self._options["find_unused_parameters"] = True
        self._rebuilt_after = 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model in DistributedDataParallel.

        Raises ConfigError for a model without parameters to train, and for an embedding with sparse gradients if the
        hook needs dense ones.
        """
        if self.mixes_samples:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self._context.world_size > 1:
            broadcast(model.buffers())
        return self._wrapped(model)

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Wrap the same model in a new DistributedDataParallel. PowerSGD starts from scratch, with new buckets."""
        check_same_change(changed, self._context)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # No synchronisation: weights are equal already, and buffers may be each rank's own.
        wrapped = self._wrapped(self.unwrap(model), init_sync=False)
        if self._waiting is not None:
            self.observe_waiting(wrapped, self._waiting)
        return wrapped

    def _wrapped(self, model: nn.Module, *, init_sync: bool = True) -> nn.Module:
        trained_parameters = trained(model, strategy="ddp")
        if self._powersgd is not None:
            check_dense(model, strategy=f"ddp with comm_hook={self._hook}")
        self._exchanges = 0
        self._order = []
        # DDP refuses device_ids for a replica on the CPU or on several devices.
        devices = self._context.devices
        device_ids = None
        if len(devices) == 1 and devices[0].index is not None:
            device_ids = [devices[0].index]
        wrapped = DistributedDataParallel(model, device_ids=device_ids, init_sync=init_sync, **self._options)
        if self._powersgd is not None:
            self._powersgd.register(wrapped)
        elif self._hook is not None:
            wrapped.register_comm_hook(None, HOOKS[self._hook])
        if self._rebuilt_after:
            self._note_order(wrapped, trained_parameters)
        return wrapped

    def _note_order(self, model: DistributedDataParallel, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note the order in which gradients come for the first exchange, by hooks that are removed then.

        parameters: those that are trained, by name.
        """
        handles: dict[str, RemovableHandle] = {}

        def note(name: str, _: Tensor) -> None:
            if model.require_backward_grad_sync:
                self._order.append(name)
                handles[name].remove()

        for name, parameter in parameters.items():
            handles[name] = parameter.register_post_accumulate_grad_hook(partial(note, name))
        self._handles += handles.values()

    def unwrap(self, model: nn.Module) -> nn.Module:
        if not isinstance(model, DistributedDataParallel):
            return model
        module: nn.Module = model.module
        return module

    @contextmanager
    def accumulate(self, model: nn.Module, *, synchronise: bool) -> Iterator[None]:
        """Exchange gradients in the backward if `synchronise`.

        Raises:
            ConfigError: some gradients were missing in the step before.
            TargetError: the first step never called `model`.
        """
        assert isinstance(model, DistributedDataParallel)
        self._begin_forward(model, synchronise=synchronise)
        # Torch records a static graph in the first backward, which must exchange gradients.
        will_exchange = synchronise or (self._options["static_graph"] and not self._exchanges)
        if will_exchange:
            self._exchanges += 1
        self._waiting_is_unreported = will_exchange
        is_first_exchange = will_exchange and self._exchanges == 1
        if is_first_exchange:
            # The forward sets it to a bool.
            model.require_forward_param_sync = None  # type: ignore[assignment]
        try:
            with nullcontext() if will_exchange else model.no_sync():
                yield
        except RuntimeError as error:
            if not self._options["find_unused_parameters"]:
                _check_unused(model.module, error)
            raise
        if is_first_exchange and model.require_forward_param_sync is None:
            raise _never_called(model.module)
        if self._waiting_is_unreported and self._waiting is not None:
            self._waiting.waiting_unknown()

    def observe_waiting(self, model: nn.Module, waiting: Waiting) -> bool:
        """Report waiting from when all of this rank's gradients are there, and for buffers.

        If a backward leaves the model's last parameter without a gradient, the former is unknown; that is reported at
        once, since the step may be the last of those that are counted together.
        """
        # PowerSGD exchanges within the backward, SyncBatchNorm within the forward too: computing can't be told from
        # waiting.
        if self._powersgd is not None or self.mixes_samples:
            return False
        assert isinstance(model, DistributedDataParallel)
        self._waiting = waiting
        last = list(trained(model.module, strategy="ddp").values())[-1]
        self._handles.append(last.register_post_accumulate_grad_hook(self._report_when_backward_ends))
        return True

    def _report_when_backward_ends(self, _: Tensor) -> None:
        """Queue the report: the engine runs queued callbacks when all gradients are there, in order.

        DDP queues its waiting for the exchange when the last parameter is done, after any hook of a parameter.
        """
        assert self._waiting is not None
        self._waiting_is_unreported = False
        torch.autograd.Variable._execution_engine.queue_callback(self._waiting.begin_waiting)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return what decides the sums, the order of gradients and a hook's state, and each rank's own buffers.

        Raises ConfigError if some gradients were missing in the last step. Every rank must call it.
        """
        if isinstance(model, DistributedDataParallel) and self._exchanges:
            _check_exchanged(model)
        exchanges = min(self._exchanges, self._rebuilt_after)
        state = {"gradient_order": list(self._order), "exchanges": exchanges, **super().state_dict(model)}
        if self._powersgd is not None:
            state["powersgd"] = self._powersgd.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Have DDP rebuild its buckets as in the saved run, and restore a hook's state and this rank's buffers.

        Takes an exchange of the size of the gradients, two with a static graph; afterwards the gradients are None.
        """
        order = state.get("gradient_order", [])
        if order and isinstance(model, DistributedDataParallel):
            self._exchanges = min(state["exchanges"], self._rebuilt_after)
            for _ in range(self._exchanges):
                with torch.enable_grad():
                    _exchange_in_order(model, order)
            self._order = list(order)
        if self._powersgd is not None and "powersgd" in state:
            self._powersgd.load_state_dict(state["powersgd"])
        super().load_state_dict(model, state)


def auto(*, context: Context, **options: Any) -> Single | DDP:
    """Return `Single` for one process, else `DDP` with these keywords: the config needn't know how many there are."""
    if context.world_size == 1:
        return Single(context=context)
    return DDP(context=context, **options)


# The signature by which keywords are checked.
auto.__signature__ = inspect.signature(DDP)  # type: ignore[attr-defined]
auto.rules = AutoRules  # type: ignore[attr-defined]


@final
class _OrderedGradients(nn.Module):
    """Takes the model's place for one backward, in which gradients come in a given order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # For DDP, which looks for the buffers.
        self.model = model

    def forward(self, order: Sequence[str]) -> Tensor:
        parameters = dict(self.model.named_parameters())
        total = torch.zeros((), device=parameters[order[0]].device)
        # Autograd runs the nodes that were made last first.
        for name in reversed(order):
            parameter = parameters[name]
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            total = total + values.sum().to(total.device)
        return total


def _exchange_in_order(model: DistributedDataParallel, order: Sequence[str]) -> None:
    """Run one backward through DDP without the model's own code, after which its buckets follow `order`.

    The order is an argument of the call, since DDP with `device_ids` can't be called without any.
    """
    module = model.module
    compiled_call = model._compiled_call_impl
    model.module = _OrderedGradients(module)
    # A compiled call would decide on the order itself.
    model._compiled_call_impl = None
    try:
        model(list(order)).backward()
    finally:
        model.module = module
        model._compiled_call_impl = compiled_call
        model.zero_grad(set_to_none=True)


def _never_called(model: nn.Module) -> TargetError:
    return TargetError(
        f"The training step never called the `model` that it was given, so no gradient of {type(model).__name__} was "
        "averaged over processes.\nCall that argument, as in model(x): not an attribute that holds the bare model, "
        "nor a part of it."
    )


def _check_exchanged(model: DistributedDataParallel) -> None:
    """Raise ConfigError if parameters had no gradient in the last backward, so that none was averaged.

    Torch finds that in the next forward, which rebuilds the buckets first. A checkpoint that comes before it would find
    replicas that differ.
    """
    try:
        model.reducer._rebuild_buckets()
    except RuntimeError as error:
        _check_unused(model.module, error)
        raise


def _check_unused(model: nn.Module, error: RuntimeError) -> None:
    """Raise ConfigError if DDP refused a forward because parameters had no gradient before, with their names."""
    match = _UNUSED.search(str(error))
    if match is None:
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    indices = [int(index) for index in match[1].split()]
    unused = [names[index] for index in indices if index < len(names)]
    raise ConfigError(
        f"strategy=ddp needs a gradient of every parameter, and in the step before {len(unused)} of {len(names)} "
        f"had none: {', '.join(unused)}.\n"
        "Use strategy=ddp strategy.find_unused_parameters=true if the forward sometimes leaves some out; "
        "requires_grad=False for what is never trained; or strategy=allreduce, which needs no such setting."
    ) from error
