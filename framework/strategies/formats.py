"""The number formats of strategy=fsdp: in which weights are gathered and computed with, and gradients reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from framework.config.schema import Precision
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError
from framework.strategies.wrapping import inside_out

_KEY = "strategy.mp_policy"
_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMED = {dtype: name for name, dtype in _NAMES.items()}

# What goes with each precision, as (param_dtype, reduce_dtype): the format that it keeps weights in, the one that it
# computes in, and for gradients of short weights a longer one.
_ALLOWED: Mapping[Precision, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Precision.FP32: (("fp32", "bf16"), ("fp32", "bf16")),
    Precision.BF16_MIXED: (("fp32", "bf16"), ("fp32", "bf16")),
    Precision.FP16_MIXED: (("fp32", "fp16"), ("fp32", "fp16")),
    Precision.BF16: (("bf16",), ("bf16", "fp32")),
    Precision.FP64: ((), ()),
}


@final
@dataclass(frozen=True)
class Formats:
    """None is the type in which a module's weights are kept."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Formats:
        """Of `{param_dtype: NAME, reduce_dtype: NAME}`, either of which may be left out or None.

        Raises ConfigError for another key or name.
        """
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{_KEY}={given}: must be a mapping, such as {_KEY}.param_dtype=bf16.")
        keys = ("param_dtype", "reduce_dtype")
        for key in given or {}:
            if key not in keys:
                guess = nearest(str(key), keys)
                raise ConfigError(
                    f"{_KEY}.{key}: there is no such key.{did_you_mean(guess and f'{_KEY}.{guess}')} "
                    f"It has {', '.join(keys)}."
                )
        return cls(**{key: _parsed(key, name) for key, name in (given or {}).items()})

    def check(self, precision: Precision) -> None:
        """Raise ConfigError where they don't go with `trainer.precision`, with the reason."""
        for key, dtype, allowed in zip(
            ("param_dtype", "reduce_dtype"),
            (self.param_dtype, self.reduce_dtype),
            _ALLOWED[precision],
            strict=True,
        ):
            if dtype is None or _NAMED[dtype] in allowed:
                continue
            raise ConfigError(
                f"{_KEY}.{key}={_NAMED[dtype]} can't go with trainer.precision={precision.value}: "
                f"{_reason(dtype, precision)}\nUse {_KEY}.{key}={' or '.join(('null', *allowed))}"
                f"{_way_out(dtype, precision)}."
            )

    def policy(self, module: nn.Module, *, kept: torch.dtype, is_model: bool) -> MixedPrecisionPolicy:
        """For a module whose weights are kept as `kept`; `is_model`: the outermost, which has what no other has.

        What the model gives is of the type that it would give without, so that a loss is computed in it. Modules with
        statistics are computed in the type of those, and give the short one again.
        """
        if self.param_dtype is None or self.param_dtype == kept:
            return MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        # Said, since versions of torch differ in what they take for none.
        reduce_dtype = self.reduce_dtype or kept
        if keeps_statistics(module):
            return MixedPrecisionPolicy(param_dtype=kept, reduce_dtype=reduce_dtype, output_dtype=self.param_dtype)
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=reduce_dtype, output_dtype=kept if is_model else None
        )

    def apart(self, model: nn.Module) -> list[nn.Module]:
        """The modules that have to be gathered by themselves, as they compute in another format than those around."""
        if self.param_dtype is None:
            return []
        return [module for module in inside_out(model) if module is not model and self._is_apart(module)]

    def _is_apart(self, module: nn.Module) -> bool:
        return keeps_statistics(module) and module.running_mean.dtype != self.param_dtype


def keeps_statistics(module: nn.Module) -> bool:
    """Whether it is of BatchNorm's kind and keeps statistics, whose type has to be that of what they are used with."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def _parsed(key: str, name: Any) -> torch.dtype | None:
    if name is None:
        return None
    if name not in _NAMES:
        guess = nearest(str(name), _NAMES)
        raise ConfigError(
            f"{_KEY}.{key}={name}: must be one of {', '.join(_NAMES)}, or null."
            f"{did_you_mean(guess and f'{_KEY}.{key}={guess}')}"
        )
    return _NAMES[name]


def _reason(dtype: torch.dtype, precision: Precision) -> str:
    if precision is Precision.FP64:
        return "that asks for 64 bits in everything, and this leaves out most of them."
    if precision is Precision.FP16_MIXED:
        return "it computes in fp16 with a loss scaler, which is for that format."
    if dtype is torch.float16:
        return "without a loss scaler small gradients become 0 in fp16."
    return f"weights are kept in {_NAMED[torch.bfloat16]}, and have no more bits to gather."


def _way_out(dtype: torch.dtype, precision: Precision) -> str:
    if dtype is torch.float16:
        return ", or trainer.precision=16-mixed, which has one" if precision is not Precision.FP64 else ""
    if dtype is torch.bfloat16:
        return ", or trainer.precision=bf16-mixed"
    return ", or trainer.precision=32-true"
