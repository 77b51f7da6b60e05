"""The model's FLOP/s in training, and model FLOPs utilization (MFU): their share of the GPUs' peak."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.system.rank_log import logger
from framework.training.train_state import TrainState
from framework.types import Batch, StepOutput

# Dense peaks in TFLOP/s, from NVIDIA's data sheets (sparse figures halved); bf16 and fp16 accumulate in fp32. The first
# entry counts whose words are all in the device's name. There is no bf16 and TF32 before Ampere.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    ("H200 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ("H200", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    ("H100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("H100 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ("H100", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    ("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("A40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("A30", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    ("A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    ("L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("L40", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    ("L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("RTX 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    ("RTX 3090", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    ("V100 PCIE", {"fp16": 112, "fp32": 14}),
    ("V100", {"fp16": 125, "fp32": 15.7}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
)
_FORMATS = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@final
class FlopRate:
    """FLOP/s of a run, from the FLOPs of one micro-batch.

    Args:
        peak: FLOP/s of all devices; None if unknown.
        is_wanted: False to count nothing.
    """

    def __init__(self, peak: float | None, *, is_wanted: bool = True) -> None:
        self.peak = peak
        # None until they are counted.
        self.flops_per_sample: float | None = None
        # A step of this training is still to be recorded.
        self.is_pending = False
        self._is_wanted = is_wanted
        self._calls: list[_Call] = []
        self._num_samples = 0

    def start(self) -> None:
        """Begin training: have one step recorded."""
        self.is_pending = self._is_wanted

    @property
    def has_calls(self) -> bool:
        """True if `count` has something to count."""
        return bool(self._calls)

    def record(self, step: Callable[..., StepOutput], model: nn.Module, batch: Batch, **keywords: Any) -> StepOutput:
        """Return what a task's step returns, and keep what the model is called with in it, for `count`."""
        self.is_pending = False
        # In place of a hook, after which a compiled model would be compiled once more.
        compiled = model._compiled_call_impl
        call = compiled or model._call_impl

        def record_call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((args, kwargs))
            return call(*args, **kwargs)

        model._compiled_call_impl = record_call
        try:
            output = step(model, batch, **keywords)
        finally:
            model._compiled_call_impl = compiled
        self._num_samples = output.num_samples
        return output

    def count(self, state: TrainState) -> None:
        """Repeat the recorded calls, forward and backward, and count. Every rank must call it.

        The calls run on a copy of the model that shares the weights: gradients, buffers and generators don't change,
        and hooks aren't called. Each gradient is dropped once it is computed, so peak memory doesn't grow, except for
        a compiled model, which runs eagerly. If a model can't be copied, or memory runs out, that is logged, and there
        are no rates.
        """
        calls = self._calls
        self._calls = []
        try:
            with state.without_side_effects():
                flops = _counted(state, calls)
            self.flops_per_sample = flops / self._num_samples or None
        except Exception as error:
            # The user's class may refuse to be copied, or to run once more.
            logger.info("train/tflop_per_s isn't logged: FLOPs can't be counted: %r", error)

    def values(self, samples_per_s: float) -> dict[str, float]:
        """Return what to log: `tflop_per_s` of all devices and, if their peak is known, `mfu`."""
        if self.flops_per_sample is None:
            return {}
        flops_per_s = self.flops_per_sample * samples_per_s
        values = {"tflop_per_s": flops_per_s / 1e12}
        if self.peak is not None:
            values["mfu"] = flops_per_s / self.peak
        return values


def peak_of_run(context: Context, precision: Precision) -> float | None:
    """Return the peak FLOP/s of all GPUs of the run; None on the CPU and for unknown GPUs."""
    if context.device.type != "cuda":
        return None
    # The older getters raise if this newer setting was changed directly; it reflects both.
    allows_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    peak = peak_of_gpu(torch.cuda.get_device_name(context.device), precision, allows_tf32=allows_tf32)
    if peak is None:
        return None
    return peak * context.topology.nnodes * context.topology.gpus_per_node


def peak_of_gpu(name: str, precision: Precision, *, allows_tf32: bool) -> float | None:
    """Return the dense peak FLOP/s of a GPU's matrix products; None if it isn't in the table."""
    words = set(name.replace("-", " ").split())
    # Grace superchips are named after their GPU: GH200 has an H200, GB200 a B200.
    words |= {word[1:] for word in words if word.startswith(("GB", "GH"))}
    is_other_model = bool(words & {"MIG", "Ti", "Laptop", "D"})
    if precision == "64-true" or is_other_model:
        return None
    for known, peaks in _PEAKS:
        if words.issuperset(known.split()):
            peak = _peak_in(peaks, precision, allows_tf32=allows_tf32)
            return None if peak is None else peak * 1e12
    return None


def _peak_in(peaks: Mapping[str, float], precision: Precision, *, allows_tf32: bool) -> float | None:
    """Return the peak of a precision among those of a GPU, in TFLOP/s; None if it hasn't that format."""
    if precision in _FORMATS:
        return peaks.get(_FORMATS[precision])
    if allows_tf32 and "tf32" in peaks:
        return peaks["tf32"]
    return peaks["fp32"]


def _counted(state: TrainState, calls: Sequence[_Call]) -> int:
    """Return the FLOPs of the calls and their backward, made on a copy of the model."""
    from torch.utils.flop_counter import FlopCounterMode  # takes 0.2 s, as it imports triton

    model = _copy_sharing_weights(state.bare_model)
    with FlopCounterMode(display=False) as counter:
        with state.precision.autocast():
            outputs = [model(*args, **kwargs) for args, kwargs in calls]
        if state.recomputes:
            # A backward takes about twice the forward; what is recomputed isn't the model's work.
            return 3 * int(counter.get_total_flops())
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        # From their sums, which need no gradients given: to check given ones, torch imports sympy, for 0.4 s.
        torch.autograd.backward([tensor.sum().real for tensor in tensors])
    return int(counter.get_total_flops())


def _copy_sharing_weights(original: nn.Module) -> nn.Module:
    """Return a copy of the model with the same weights, buffers of its own and no hooks, which drops its gradients."""
    # What `deepcopy` takes in place of a copy, by the id of the original.
    memo: dict[int, Any] = {}
    for parameter in original.parameters():
        alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        if alias.requires_grad:
            alias.register_post_accumulate_grad_hook(_drop_gradient)
        memo[id(parameter)] = alias
    for buffer in original.buffers():
        memo[id(buffer)] = buffer.clone()
    for module in original.modules():
        for name in _HOOKS:
            memo[id(vars(module)[name])] = OrderedDict[int, Any]()
    model = copy.deepcopy(original, memo)
    for module in model.modules():
        # LightningModules copy it, bound to the original.
        module._compiled_call_impl = None
    return model


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
