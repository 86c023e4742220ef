"""One operator, run on synthetic data: as a whole, or on a part of its rows if the whole does not fit into memory."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Argument, Op, Ref, Scalar, StepGraph, Value, operands, view_bytes
from port_planner.ir.run_op import fill_all, flatten
from port_planner.ir.torch_device import device_name, synchronize
from port_planner.ir.torch_operators import dtype, function_of
from port_planner.operators import base_name, operator_of, overload_name
from port_planner.operators.row import ArgumentCheck

_DRAWN = 65521
"""Number of synthetic numbers before they repeat: a prime, so that no two rows of a matrix are equal."""

_TRIED_ROWS = 2
"""Number of rows with which an operator is tested on a part; a single row would match any operands."""

_NEVER_CUT = (
    ArgumentCheck.LSTM,
    ArgumentCheck.CTC_LOSS,
    ArgumentCheck.EMBEDDING_BAG,
    ArgumentCheck.EMBEDDING_BAG_BACKWARD,
)
"""Operators whose operands contain sizes of others, or places in them; on some of the rows they would
access memory out of bounds.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator of a graph, and which of its operands' storages are cold."""

    graph: StepGraph
    op: Op
    cold: frozenset[int]
    rows: int = 0
    parts: int = 1
    """Number of parts; only one part of `rows` rows is run, on values with that many rows in their first dimension."""

    def ready(self) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        """Return a function that runs it on synthetic data, and the operands of it that are warm."""
        op = self.op
        function = function_of(op)
        tensors: dict[int, torch.Tensor] = {}
        for v in operands(op):
            tensors.setdefault(v, _made_up(self._value(v), self.graph.storages[self.graph.values[v].storage].device))
        self._choose_rows(tensors)
        self._fill_lengths(tensors)
        place = operator_of(op.name).pivots
        if place is not None and isinstance(pivots := op.args[place], Ref):
            tensors[pivots.value].fill_(1)
        args, kwargs = fill_all(op, tensors.__getitem__)
        warm = [t for v, t in tensors.items() if self.graph.values[v].storage not in self.cold]
        return lambda: function(*args, **kwargs), warm

    @property
    def kind(self) -> str:
        """The kind of device on which it runs."""
        return self.graph.device

    @property
    def operand_bytes(self) -> int:
        """The bytes of its operands, each in separate memory."""
        return sum(_bytes(self._value(v)) for v in {*operands(self.op)})

    @property
    def need_bytes(self) -> int:
        """The bytes of its operands and results."""
        found = {self.graph.values[v].storage for v in operands(self.op)}
        made = (self._value(v) for v in self.op.outputs if v is not None and self.graph.values[v].storage not in found)
        return self.operand_bytes + sum(_bytes(value) for value in made)

    def within(self, limit_bytes: float) -> "Call":
        """Return the call or, if it needs more memory, a call on a fraction of its rows, which costs that fraction.

        Returns the call itself if it runs on no fraction.
        """
        if self.need_bytes <= limit_bytes or operator_of(self.op.name).check in _NEVER_CUT:
            return self
        fattest = max(
            (self.graph.values[v] for v in (*operands(self.op), *self.op.outputs) if v is not None), key=_bytes
        )
        rows = fattest.shape[0] if fattest.shape else 0
        counts = itertools.takewhile(lambda count: count <= rows, (2**n for n in itertools.count(1)))
        parts = (replace(self, rows=rows, parts=count) for count in counts)
        part = next((part for part in parts if part.need_bytes <= limit_bytes), None)
        if part is None:
            return self
        try:
            replace(part, parts=max(rows // _TRIED_ROWS, part.parts)).ready()[0]()
        except RuntimeError:  # other operands do not match so few rows
            return self
        return part

    def _value(self, v: int) -> Value:
        value = self.graph.values[v]
        if self.parts > 1 and value.shape[:1] == (self.rows,) and value.stride[0] == max(value.stride):
            return replace(value, shape=(-(-self.rows // self.parts), *value.shape[1:]))
        return value

    def _choose_rows(self, tensors: dict[int, torch.Tensor]) -> None:
        """Make a mask that is an index choose as many elements as when the step was recorded."""
        op = self.op
        if not operator_of(op.name).index_list or not isinstance(indices := op.args[1], tuple):
            return
        written = base_name(op.name).startswith("index_put")
        moved = op.args[2] if written else None if op.outputs[0] is None else Ref(op.outputs[0])
        shape = self.graph.values[moved.value].shape if isinstance(moved, Ref) else ()
        for place, index in enumerate(indices):
            if isinstance(index, Ref) and tensors[index.value].dtype is torch.bool and place < len(shape):
                mask = torch.zeros(tensors[index.value].numel(), dtype=torch.bool, device=tensors[index.value].device)
                mask[: shape[place]] = True
                tensors[index.value].copy_(mask.view(tensors[index.value].shape))

    def _fill_lengths(self, tensors: dict[int, torch.Tensor]) -> None:
        """Make the lengths that a CTC loss takes as tensors as long as its other operands allow, and one less where it
        then widens what it made (`of_all_labels`).
        """
        first = operator_of(self.op.name).lengths
        if first is None or overload_name(self.op.name) != "Tensor":
            return
        operands = [a for a in self.op.args if isinstance(a, Ref)]
        log_probs, labels, input_lengths, lengths = (tensors[a.value] for a in operands[first : first + 4])
        input_lengths.fill_(log_probs.shape[0])
        alpha = self.op.outputs[1] if first == 0 else operands[-1].value
        longest = 0 if alpha is None else (self.graph.values[alpha].shape[-1] - 1) // 2
        lengths.fill_(longest - (labels.dim() > 1 and longest > 0))
        if labels.dim() == 1:
            lengths.copy_((labels.numel() - longest * torch.arange(len(lengths))).clamp(0, longest))


def signature(call: Call) -> Any:
    """Return what distinguishes calls: name, types, shapes and strides, and which operands are cold."""

    def shape(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            v = call.graph.values[argument.value]
            device = call.graph.storages[v.storage].device
            elsewhere = () if device == CPU else (device, device_name(device))
            return ("value", v.dtype, v.shape, v.stride, v.storage in call.cold, *elsewhere)
        if isinstance(argument, Scalar):
            return "scalar"
        if isinstance(argument, tuple):
            return tuple(shape(a) for a in argument)
        return (type(argument).__name__, argument)

    op = call.op
    return op.name, tuple(shape(a) for a in op.args), tuple((k, shape(a)) for k, a in op.kwargs)


def runs_alike(call: Call) -> bool:
    """Return whether a call runs on its device and returns tensors with the layout that was recorded for the step."""
    try:
        result = call.ready()[0]()
        synchronize(call.graph.device)
    except RuntimeError:  # there is no kernel, or not for these types
        return False
    given = flatten(result)
    if len(given) != len(call.op.outputs):
        return False
    wanted = [None if v is None else call.graph.values[v] for v in call.op.outputs]
    return all(
        value is None
        or (str(t.dtype), tuple(t.shape), t.stride()) == (f"torch.{value.dtype}", value.shape, value.stride)
        for t, value in zip(given, wanted, strict=True)
    )


def _bytes(value: Value) -> int:
    return view_bytes(value.dtype, value.shape, value.stride, 0)


def _made_up(value: Value, device: str) -> torch.Tensor:
    kind = dtype(value.dtype)
    flat = torch.empty(_bytes(value) // kind.itemsize, dtype=kind, device=device)
    if kind.is_floating_point:
        _fill(flat)
    else:
        flat.zero_()
    return flat.as_strided(value.shape, value.stride)


def _fill(flat: torch.Tensor) -> None:
    """Fill with one sequence of numbers repeatedly, because drawing all of them takes as long as many operators."""
    drawn = flat[:_DRAWN].uniform_(0.1, 0.9)
    for chunk in flat[_DRAWN:].split(_DRAWN):
        chunk.copy_(drawn[: chunk.numel()])
