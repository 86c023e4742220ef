"""The cost of a step on a core: instructions measured per unit of work, seconds and joules by the board's file.

Instructions are counted exactly in QEMU, row by row (`by_row` of `benchmarks.mcu_networks.target.run_image`), and
averaged by kernel. For bands, this estimate is a third too low. Cycles per instruction, clock and watts come from the
board's file, each with its source. Nothing here ran on a real board.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.boards import load_board
from port_planner.mcu.autodiff import SparseScheme, Step, StepKind, TableRow
from port_planner.mcu.ir import WEIGHTED, Graph, KernelCall, OpKind

Kernel = tuple[StepKind, OpKind | None, str]
"""A step kind, the kind of its operator (None if the cost does not depend on it), and a form with costs of its own."""

ANY_OP = frozenset({StepKind.MASK, StepKind.BIAS, StepKind.COPY, StepKind.LOSS})

NARROW, STRIDED, GATED = "narrow", "strided", "gated"
"""Forms: convolutions whose input channels are not a multiple of four; depthwise convolutions with a stride; the gates
of a recurrent unit, per value of its output, without the products.
"""


def kernel_of(graph: Graph, step: Step) -> Kernel:
    """Return the key under which a step's instructions are counted."""
    if step.kind in ANY_OP:
        return step.kind, None, ""
    op = graph.op(step.op)
    narrow = op.kind is OpKind.CONV and op.in_shape.channels % 4
    strided = op.kind is OpKind.DEPTHWISE and max(op.stride) > 1
    return step.kind, op.kind, NARROW if narrow else STRIDED if strided else ""


def work_of(graph: Graph, step: Step, scheme: SparseScheme) -> int:
    """Return a step's work: multiply-accumulates of weighted layers, window elements of poolings, else elements."""
    op = graph.op(step.op)
    if step.kind is StepKind.BIAS:
        return op.out_shape.height * op.out_shape.width * op.rows
    if step.kind in ANY_OP:
        return op.out_shape.elements
    if step.kind is StepKind.WEIGHT:
        return op.macs * scheme.of(op.name).rows * scheme.chosen_parts // (256 * op.rows)
    return op.macs if op.kind in WEIGHTED else _elements(op)


def _elements(op: KernelCall) -> int:
    window = op.kernel[0] * op.kernel[1] if op.kind in (OpKind.AVERAGE_POOL, OpKind.MAX_POOL) else 1
    return op.out_shape.elements * window


_STEPS = (StepKind.FORWARD, StepKind.INPUT, StepKind.WEIGHT)

_BY_OPERATOR: Mapping[OpKind, tuple[tuple[float, ...], tuple[float, ...]]] = {
    OpKind.CONV: ((2.05, 3.9, 5.2), (15.2, 140.0, 167.2)),
    OpKind.DEPTHWISE: ((5.7, 14.3, 23.1), (31.5, 165.6, 170.3)),
    OpKind.CLASSIFIER: ((6.1, 19.5, 66.3), (18.8, 414.0, 757.0)),
    OpKind.GROUPED: ((37.6, 85.0, 34.3), (67.1, 281.9, 263.9)),
    OpKind.TRANSPOSED: ((46.3, 51.7, 57.0), (105.8, 286.6, 271.3)),
    OpKind.GRU: ((5.4, 13.4, 16.7), (5.4, 216.4, 280.0)),
    OpKind.ADD: ((30.1,), (40.3,)),
    OpKind.AVERAGE_POOL: ((12.9, 8.8), (21.2, 169.9)),
    OpKind.MAX_POOL: ((22.6, 23.9), (34.2, 44.3)),
    OpKind.TABLE: ((10.7, 10.0), (13.4, 139.0)),
    OpKind.CONCAT: ((18.4, 3.9), (27.9, 7.5)),
    OpKind.UPSAMPLE: ((16.7, 7.8), (24.3, 75.0)),
    OpKind.MULTIPLY: ((40.6, 32.2), (96.2, 373.7)),
    OpKind.SCALE: ((41.2, 31.5), (114.9, 385.2)),
}
"""Instructions per unit of work on `M4F` and on `M0`, for each of `_STEPS` that the operator has."""
_OF_ANY_OP: Mapping[StepKind, tuple[float, float]] = {
    StepKind.MASK: (8.1, 10.8),
    StepKind.BIAS: (6.8, 105.8),
    StepKind.COPY: (7.1, 7.3),
    StepKind.LOSS: (78.6, 2443.0),
}
_BY_FORM: Mapping[Kernel, tuple[float, float]] = {
    (StepKind.FORWARD, OpKind.CONV, NARROW): (3.5, 29.4),
    (StepKind.WEIGHT, OpKind.CONV, NARROW): (18.0, 126.0),
    (StepKind.INPUT, OpKind.DEPTHWISE, STRIDED): (29.5, 255.9),
    (StepKind.FORWARD, OpKind.GRU, GATED): (355.0, 10282.0),
    (StepKind.INPUT, OpKind.GRU, GATED): (421.0, 11808.0),
}


def _counts(core: int) -> Mapping[Kernel, float]:
    """Return the counts of one core; a special form without a count of its own costs as much as the plain one."""
    plain: dict[tuple[StepKind, OpKind | None], float] = {(step, None): both[core] for step, both in _OF_ANY_OP.items()}
    for op, both in _BY_OPERATOR.items():
        plain |= {(step, op): count for step, count in zip(_STEPS, both[core], strict=False)}
    table = {(step, op, form): count for (step, op), count in plain.items() for form in ("", NARROW, STRIDED)}
    return table | {kernel: both[core] for kernel, both in _BY_FORM.items()}


M4F = _counts(0)
"""Instructions per multiply-accumulate on the emulated Cortex-M4F with its DSP kernels, random weights.

Counted on the camera network and MobileNetV2-w0.35. Max pooling is counted on the tests' network of every layer, and
groups to products on their network of joins, transposed convolutions on that of transposed ones. Recurrent units are
counted on layers of 8 to 32 values and 10 steps.
"""

M0 = _counts(1)
"""Instructions per multiply-accumulate on the emulated Cortex-M0.

Without an FPU, the backward part costs 30 times as much per multiply-accumulate as on an M4F. Counted on the digits
network. Poolings and residuals are counted on a small residual network, and groups to products on the tests' network of
joins with 8x6 pixels, transposed convolutions on that of transposed ones. Recurrent units are counted on layers of 8 to
32 values and 10 steps. Zero gradients are skipped, so counts vary by a tenth between samples.
"""

_BY_BOARD = {"mkr1000": M0, "nrf52840": M4F}


class CoreError(PortError):
    """Raised for a board whose core's instruction costs were never measured."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True)
class CoreCosts:
    """The core of one board. `watts`: the current of the whole board while the core runs."""

    name: str
    instructions: Mapping[Kernel, float]
    seconds_per_instruction: float
    watts: float

    def step_instructions(self, graph: Graph, step: Step, scheme: SparseScheme) -> float:
        """Return the estimated instructions of one step."""
        op, counted = graph.op(step.op), self.instructions[kernel_of(graph, step)] * work_of(graph, step, scheme)
        if op.kind is OpKind.GRU and step.kind in (StepKind.FORWARD, StepKind.INPUT):
            counted += self.instructions[step.kind, op.kind, GATED] * op.out_shape.elements
        return counted

    def seconds(self, graph: Graph, step: Step, scheme: SparseScheme) -> float:
        """Return the estimated seconds of one step."""
        return self.step_instructions(graph, step, scheme) * self.seconds_per_instruction


def row_seconds(graph: Graph, scheme: SparseScheme, core: CoreCosts, row: TableRow) -> float:
    """Return the estimated seconds of the lines that a row computes."""
    op = graph.op(row.op)
    height = op.in_shape.height if row.kind is StepKind.INPUT else op.out_shape.height
    first, last = (0, height) if row.span is None else row.span
    return core.seconds(graph, Step(row.kind, row.op), scheme) * (last - first) / height


def counted_boards() -> tuple[str, ...]:
    """Return the boards whose core's instructions were counted."""
    return tuple(sorted(_BY_BOARD))


def core_costs(board: str) -> CoreCosts:
    """Return the costs of a shipped board's core.

    Raises CoreError for a board without measured kernels, BoardError for an unknown board.
    """
    if board not in _BY_BOARD:
        raise CoreError(f"instructions were not counted for {board!r}; choose one of {', '.join(sorted(_BY_BOARD))}")
    found = load_board(board)
    seconds = found["cycles_per_instruction"] / found["clock_hz"]
    return CoreCosts(board, _BY_BOARD[board], seconds, found["compute_watts"] + found["static_watts"])
