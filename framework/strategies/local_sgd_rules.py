"""What `strategy=local_sgd` asks of a request; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from framework.config.schema import Precision
from framework.errors import ConfigError
from framework.strategies.rules import SyncedRules, refusals


class LocalSGDRules(SyncedRules):
    @property
    def replicas_differ(self) -> bool:  # type: ignore[override]
        return self.request.topology.world_size > 1

    def mistakes(self) -> Iterator[str]:
        request = self.request
        every_n_steps = request.options.get("every_n_steps", 1)
        return refusals(
            lambda: check_exchanges(every_n_steps),
            lambda: check_own_steps(request.precision, replicas_differ=self.replicas_differ),
        )


def check_exchanges(every_n_steps: int) -> None:
    """Raise ConfigError for weights that are never averaged."""
    if every_n_steps < 1:
        raise ConfigError(f"strategy.every_n_steps={every_n_steps} must be 1 or more: steps between two averages.")


def check_own_steps(precision: Precision, *, replicas_differ: bool) -> None:
    """Raise ConfigError for a scaled loss: each rank would skip other steps."""
    if precision == "16-mixed" and replicas_differ:
        raise ConfigError(
            f"trainer.precision={precision} scales the loss and skips a step whose gradients overflow. "
            "Under strategy=local_sgd each process would skip steps of its own, and their learning rates would "
            "drift apart.\nUse trainer.precision=bf16-mixed, or another strategy."
        )
