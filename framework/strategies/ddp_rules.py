"""What `strategy=ddp` and `strategy=auto` ask of a request, and the names of `strategy.comm_hook`; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from framework.config.schema import Precision
from framework.config.topology import Topology
from framework.errors import ConfigError
from framework.strategies.rules import SyncedRules, check_one_device, refusals

# The names of `strategy.comm_hook`.
FP16_HOOK = "fp16"
BF16_HOOK = "bf16"
POWERSGD = "powersgd"
_HOOKS = (FP16_HOOK, BF16_HOOK, POWERSGD)


class DDPRules(SyncedRules):
    def mistakes(self) -> Iterator[str]:
        request = self.request
        hook = request.options.get("comm_hook")
        return refusals(
            lambda: check_sync_batchnorm(bool(request.options.get("sync_batchnorm")), request.topology),
            lambda: check_comm_hook(hook, request.topology),
            lambda: check_powersgd_precision(hook, request.precision),
        )


class AutoRules(DDPRules):
    """With one process, the keywords of `ddp` have no effect."""

    def mistakes(self) -> Iterator[str]:
        return super().mistakes() if self.request.topology.world_size > 1 else iter(())


def check_sync_batchnorm(sync_batchnorm: bool, topology: Topology) -> None:
    """Raise ConfigError on a CPU, TopologyError for processes of several devices."""
    if not sync_batchnorm:
        return
    if topology.gpus_per_node == 0:
        raise ConfigError(
            "strategy.sync_batchnorm=true needs GPUs: PyTorch's SyncBatchNorm doesn't run on the CPU.\n"
            "Use strategy.sync_batchnorm=false, or normalise each sample by itself, as torch.nn.GroupNorm does."
        )
    check_one_device(topology, option="strategy.sync_batchnorm=true")


def parse_comm_hook(given: str | Mapping[str, Any] | None) -> tuple[str | None, dict[str, Any]]:
    """Return the name of `strategy.comm_hook` and its options, which only `{powersgd: {option: value}}` may have.

    Raises ConfigError for an unknown name, and for options of another hook.
    """
    if given is None:
        return None, {}
    if isinstance(given, str) and given in _HOOKS:
        return given, {}
    if isinstance(given, str) or list(given) != [POWERSGD]:
        raise ConfigError(
            f"strategy.comm_hook={given}: use one of {', '.join(_HOOKS)}, or null; only {POWERSGD} has "
            "options, as in 'strategy.comm_hook={powersgd:{matrix_approximation_rank:2}}'."
        )
    return POWERSGD, dict(given[POWERSGD] or {})


def check_comm_hook(given: str | Mapping[str, Any] | None, topology: Topology) -> None:
    """Raise ConfigError for what isn't a hook, TopologyError for PowerSGD on processes of several devices."""
    name, _ = parse_comm_hook(given)
    if name == POWERSGD:
        check_one_device(topology, option="strategy.comm_hook=powersgd")


def check_powersgd_precision(comm_hook: str | Mapping[str, Any] | None, precision: Precision) -> None:
    """Raise ConfigError for a scaled loss with a hook that keeps errors of earlier gradients."""
    is_powersgd = comm_hook == POWERSGD or (isinstance(comm_hook, Mapping) and POWERSGD in comm_hook)
    if is_powersgd and precision == "16-mixed":
        raise ConfigError(
            f"trainer.precision={precision} scales the loss and skips a step whose gradients overflow. "
            "strategy.comm_hook=powersgd adds the errors of earlier steps to the gradients: after an overflow they "
            "would never be finite again.\n"
            "Use trainer.precision=bf16-mixed, or another strategy.comm_hook."
        )
