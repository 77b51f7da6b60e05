"""What one optimizer step does: its operators and the memory that they take, seen by one dispatch mode.

    with Tracer(phase) as tracer:
        model, optimizer = build()
        tracer.name_modules(model)
        train_step()                        # the first step makes the optimizer's state
        tracer.name_optimizer_state(optimizer)
        tracer.start_step()
        train_step()                        # the step that is traced
    trace = tracer.trace()
    trace.peak().total_bytes

The tensors may be fake (`torch._subclasses.FakeTensorMode`): then nothing is computed, and no memory is taken. torch's
`MemTracker` counts the same way, but doesn't say which modules own the memory at the peak, and refuses a second step.
"""

from __future__ import annotations

import math
import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop
from torch.utils.hooks import RemovableHandle

from framework.distributed.storages import storages
from framework.jobs.plan.calls import Call

# Categories of memory.
WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
OPTIMIZER: Final = "optimizer"
BUFFERS: Final = "buffers"
# What the forward makes, recomputed forwards too.
ACTIVATIONS: Final = "activations"
# What the backward and the optimizer make, and drop again.
TEMPORARIES: Final = "temporaries"
# Copies of gradients in which they are exchanged.
BUCKETS: Final = "buckets"
# Sharded weights that are gathered to compute with them.
GATHERED: Final = "gathered"
# Micro-batches.
BATCHES: Final = "batches"
# What was there before the step and is none of these, such as a task's sums.
OTHERS: Final = "others"
CATEGORIES: Final = (
    WEIGHTS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    TEMPORARIES,
    BUCKETS,
    GATHERED,
    BUFFERS,
    BATCHES,
    OTHERS,
)

# Phases of a step.
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
UPDATE: Final = "optimizer"

# FLOPs of operators that torch's counter lacks: attention on a CPU.
_FLOPS: Final[Mapping[Any, Callable[..., int]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}

# oneDNN's LSTM: it keeps for the backward what only it knows the size of, and of which a fake tensor has nothing.
_KEEPS_UNKNOWN: Final = torch.ops.aten.mkldnn_rnn_layer.default


class UnknownMemoryError(Exception):
    """An operator keeps memory whose size isn't known before it runs."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator."""

    # As torch names it: "aten.addmm.default".
    name: str
    # The name of the module in whose forward or backward it runs: "blocks.0.attention"; "" outside of any.
    module: str
    # FORWARD, BACKWARD (with what is recomputed in it), or UPDATE.
    phase: str
    flops: int
    # Bytes of its tensors, each counted once. A view reads and writes nothing.
    read_bytes: int
    written_bytes: int
    # The type of its result, in which matrix products are computed; None without a floating-point result.
    dtype: torch.dtype | None
    # Shapes of the tensors that it reads.
    shapes: tuple[tuple[int, ...], ...]
    # True: the forward is repeated in the backward.
    recomputed: bool
    # What it takes while it runs, beyond its results.
    workspace_bytes: int = 0
    # To make it again; None for one of sparse tensors.
    call: Call | None = None


@dataclass(slots=True)
class Block:
    """A piece of memory: a storage, from when it is made until it is freed."""

    size_bytes: int
    category: str
    # The module that made it, or has it as weight or buffer.
    module: str
    # It is there from operator `made` on, an index into the trace's operators; -1: since before the step.
    made: int
    # Freed before operator `freed` runs; None: it is there after the step, too.
    freed: int | None = None


@dataclass(frozen=True)
class Moment:
    """What is taken at a moment of a step."""

    total_bytes: int
    by_category: Mapping[str, int]
    # By category and module.
    by_module: Mapping[tuple[str, str], int]
    # The operator that runs then.
    operator: Operator


@dataclass(frozen=True)
class Trace:
    """One optimizer step of one rank."""

    operators: Sequence[Operator]
    blocks: Sequence[Block]
    # Of each micro-batch; 0 if unknown.
    samples: int = 0
    # How often the step makes what is here of forward and backward: of many micro-batches, only two are traced.
    repetitions: float = 1.0

    @property
    def flops(self) -> float:
        return sum(self.times(operator) * operator.flops for operator in self.operators)

    def times(self, operator: Operator) -> float:
        """Return how often the step makes an operator of this trace."""
        if operator.phase == UPDATE:
            return 1.0
        return self.repetitions

    def live_bytes(self) -> list[int]:
        """Return the bytes that are taken while each operator runs."""
        changes = [0] * (len(self.operators) + 1)
        for block in self.blocks:
            changes[max(block.made, 0)] += block.size_bytes
            if block.freed is not None:
                changes[max(block.freed, 0)] -= block.size_bytes
        live = []
        total = 0
        for operator, change in zip(self.operators, changes, strict=False):
            total += change
            live.append(total + operator.workspace_bytes)
        return live

    def peak(self) -> Moment:
        """Return the moment at which most memory is taken."""
        live = self.live_bytes()
        return self._moment(max(range(len(live)), key=live.__getitem__))

    def update(self) -> Moment:
        """Return the moment at which the optimizer begins, when all gradients are there."""
        for index, operator in enumerate(self.operators):
            if operator.phase == UPDATE:
                return self._moment(index)
        return self._moment(len(self.operators) - 1)

    def _moment(self, index: int) -> Moment:
        by_module: Counter[tuple[str, str]] = Counter()
        for block in self.blocks:
            is_there = block.made <= index and (block.freed is None or index < block.freed)
            if is_there:
                by_module[block.category, block.module] += block.size_bytes
        operator = self.operators[index]
        if operator.workspace_bytes:
            by_module[TEMPORARIES, operator.module] += operator.workspace_bytes
        by_category = dict.fromkeys(CATEGORIES, 0)
        for (category, _), size_bytes in by_module.items():
            by_category[category] += size_bytes
        return Moment(sum(by_category.values()), by_category, dict(by_module), operator)


class _Tracked(NamedTuple):
    """A storage that is there."""

    block: Block
    # Kept for its callback.
    reference: weakref.ref[torch.UntypedStorage]


@final
class Tracer(TorchDispatchMode):
    """Sees every operator and every storage that operators make while it is entered.

    Args:
        phase: returns the phase of the step: FORWARD, BACKWARD or UPDATE.
        limit_s: TimeoutError is raised in the first operator after as many CPU seconds of this process.
    """

    def __init__(self, phase: Callable[[], str], *, limit_s: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are fake: the mode that makes them is entered already.
        self.is_fake = active_fake_mode() is not None
        self._phase = phase
        self._ends_s = math.inf
        if limit_s is not None:
            self._ends_s = time.process_time() + limit_s
        self._operators: list[Operator] = []
        self._blocks: list[Block] = []
        # The storages that are there, by id.
        self._tracked: dict[int, _Tracked] = {}
        # The modules whose forward runs, the innermost last.
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._parameters: list[nn.Parameter] = []
        # True from the first operator of an update to its last one.
        self._is_updating = False
        # Which module's forward made the autograd nodes with these numbers: number of the first, and the module.
        self._first_nodes: list[int] = []
        self._node_modules: list[str] = []
        # Nodes with smaller numbers are noted.
        self._noted_nodes = 0
        self._exit = ExitStack()

    def __enter__(self) -> Tracer:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._exit.enter_context(_hooked(register_module_forward_pre_hook(self._enter_module)))
        self._exit.enter_context(_hooked(register_module_forward_hook(self._leave_module, always_call=True)))
        self._exit.enter_context(_observed_resizes(self._resized))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exit.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    # What the tensors are

    def name_modules(self, model: nn.Module) -> None:
        """Call modules by their names in `model`, and its parameters and buffers by what they are."""
        for name, module in model.named_modules():
            self._names[id(module)] = name
            for parameter in module.parameters(recurse=False):
                self._parameters.append(parameter)
                self.categorize(parameter, WEIGHTS, module=name)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_gradient)
            for buffer in module.buffers(recurse=False):
                self.categorize(buffer, BUFFERS, module=name)

    def categorize(self, tensors: Any, category: str, *, module: str | None = None) -> None:
        """Set what tensors are, also in nested containers; they are seen from here on if they weren't yet."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                for storage in storages(tensor):
                    block = self._track(storage, category)
                    block.category = category
                    if module is not None:
                        block.module = module

    def name_optimizer_state(self, optimizer: Optimizer) -> None:
        """Call the tensors of the optimizer's state by what they are."""
        for parameter, state in optimizer.state.items():
            self.categorize(state, OPTIMIZER, module=self._module_of_weight(parameter))

    def start_step(self) -> None:
        """Begin the step that is traced: forget all operators so far, and what they made and dropped."""
        self._operators = []
        self._blocks = []
        for tracked in self._tracked.values():
            tracked.block.made = -1
            if tracked.block.category in (ACTIVATIONS, TEMPORARIES):
                tracked.block.category = OTHERS
            self._blocks.append(tracked.block)

    def trace(self) -> Trace:
        """Return what was seen since `start_step`."""
        return Trace(tuple(self._operators), tuple(self._blocks))

    def _note_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or self._category(gradient) == BUCKETS:
            return
        self.categorize(gradient, GRADIENTS, module=self._module_of_weight(parameter))

    def _category(self, tensor: Tensor) -> str | None:
        tracked = self._find(tensor)
        return None if tracked is None else tracked.block.category

    def _module_of_weight(self, parameter: Tensor) -> str | None:
        tracked = self._find(parameter)
        return None if tracked is None else tracked.block.module

    def _find(self, tensor: Tensor) -> _Tracked | None:
        for storage in storages(tensor):
            if id(storage) in self._tracked:
                return self._tracked[id(storage)]
        return None

    # Modules

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._note_nodes()
        name = self._names.get(id(module))
        if name is None:
            # One of the task, or a wrapper around the model.
            name = self._modules[-1] if self._modules else ""
        self._modules.append(name)

    def _leave_module(self, *_: Any) -> None:
        self._note_nodes()
        self._modules.pop()

    def _note_nodes(self) -> None:
        """Note that the autograd nodes since the last call were made by the module that is running."""
        number = torch.autograd._get_sequence_nr()
        if number > self._noted_nodes:
            module = self._modules[-1] if self._modules else ""
            self._first_nodes.append(self._noted_nodes)
            self._node_modules.append(module)
            self._noted_nodes = number

    def _present_module(self, *, is_backward: bool) -> str:
        if self._modules:
            return self._modules[-1]
        if not is_backward:
            return ""
        # None in what runs after a node, such as a hook.
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        index = bisect_right(self._first_nodes, number) - 1
        if index < 0 or number >= self._noted_nodes:
            # The node was made outside of any module, as that of a loss.
            return ""
        return self._node_modules[index]

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # A DTensor computes with local tensors, which are seen then.
            return NotImplemented
        if time.process_time() > self._ends_s:
            raise TimeoutError("it takes too long here")
        kwargs = kwargs or {}
        if self.is_fake and _all_real((args, kwargs)):
            # Samples, which a task may look at before training.
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self._phase() == UPDATE and self.is_fake:
            # An optimizer reads how many steps it has made.
            return 1.0
        if func is _KEEPS_UNKNOWN and self.is_fake:
            raise UnknownMemoryError("an LSTM keeps memory whose size only oneDNN knows")
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            # It asks for a property of a tensor.
            return result
        phase = self._phase()
        if phase != UPDATE:
            self._is_updating = False
        elif not self._is_updating:
            self._is_updating = True
            for parameter in self._parameters:
                # FSDP sets gradients itself, without a hook.
                self._note_gradient(parameter)
        in_backward = torch._C._current_graph_task_id() != -1
        module = self._present_module(is_backward=in_backward)
        is_recomputed = in_backward and bool(self._modules)
        self._operators.append(
            _operator(func, args, kwargs, result, module=module, phase=phase, recomputed=is_recomputed)
        )

        category = ACTIVATIONS
        if phase == UPDATE or (in_backward and not is_recomputed):
            category = TEMPORARIES
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                for storage in storages(tensor):
                    self._track(storage, category, module=module)
        return result

    # Storages

    def _track(self, storage: torch.UntypedStorage, category: str, *, module: str = "") -> Block:
        tracked = self._tracked.get(id(storage))
        if tracked is not None:
            return tracked.block
        return self._begin_block(storage, category, module=module)

    def _begin_block(self, storage: torch.UntypedStorage, category: str, *, module: str) -> Block:
        block = Block(storage.nbytes(), category, module, made=len(self._operators) - 1)
        self._blocks.append(block)
        key = id(storage)

        def end(_: object) -> None:
            tracked = self._tracked.pop(key)
            tracked.block.freed = len(self._operators)

        self._tracked[key] = _Tracked(block, weakref.ref(storage, end))
        return block

    def _resized(self, storage: torch.UntypedStorage) -> None:
        tracked = self._tracked.get(id(storage))
        if tracked is None or tracked.block.size_bytes == storage.nbytes():
            return
        # Only FSDP does this, with the weights that it gathers.
        old = tracked.block
        old.category = GATHERED
        old.freed = len(self._operators)
        block = Block(storage.nbytes(), GATHERED, old.module, made=len(self._operators))
        self._blocks.append(block)
        self._tracked[id(storage)] = tracked._replace(block=block)


# Storages


@contextmanager
def _observed_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` after each `storage.resize_`, by which FSDP frees and takes memory: no operator does it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def _hooked(handle: RemovableHandle) -> Iterator[None]:
    with handle:
        yield


# Operators


def _operator(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    *,
    module: str,
    phase: str,
    recomputed: bool,
) -> Operator:
    inputs = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    read_bytes = 0
    written_bytes = 0
    if not func.is_view:
        distinct_inputs = {id(tensor): tensor for tensor in inputs}
        read_bytes = sum(_nbytes(tensor) for tensor in distinct_inputs.values())
        written = {id(tensor): tensor for tensor in outputs}
        for values in _mutated(func, args, kwargs):
            for leaf in tree_leaves(values):
                if isinstance(leaf, Tensor):
                    written[id(leaf)] = leaf
        written_bytes = sum(_nbytes(tensor) for tensor in written.values())
    dtype = next((tensor.dtype for tensor in outputs if tensor.is_floating_point()), None)
    call = None
    if all(tensor.layout == torch.strided for tensor in inputs):
        # A sparse tensor can't be made without its values.
        call = Call.of(func, args, kwargs)
    return Operator(
        str(func),
        module,
        phase,
        _flops(func, args, kwargs, result),
        read_bytes,
        written_bytes,
        dtype,
        tuple(tuple(tensor.shape) for tensor in inputs),
        recomputed,
        call=call,
    )


def _all_real(arguments: Any) -> bool:
    """Return True if there are tensors among the arguments, and none of them is fake."""
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet in _FLOPS:
        return _FLOPS[packet](*args, **kwargs, out_val=result)
    return 0


def _mutated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that the operator writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name in kwargs:
            yield kwargs[argument.name]
        elif position < len(args):
            yield args[position]


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor's elements take: those of an expanded one, or of a view, are counted once."""
    if tensor.layout != torch.strided:
        return sum(storage.nbytes() for storage in storages(tensor))
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
