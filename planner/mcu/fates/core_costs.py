"""What a step costs on a core: instructions measured per unit of work, seconds and joules by the board's file.

Instructions are counted exactly in QEMU (`python -m benchmarks.mcu --kernels` prints this table anew); cycles per
instruction, clock and watts are the board file's, each with its source. So the ratio of two plans is measured, their
seconds and joules are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.ir.boards import load_board
from planner.ir.errors import ExitCode, PortError
from planner.mcu.autodiff import SparseScheme, Step, StepKind
from planner.mcu.ir import WEIGHTED, Graph, KernelCall, OpKind

Kernel = tuple[StepKind, OpKind | None]
"""A step kind and the kind of its operator; None where the step's cost does not depend on it."""

ANY_OP = frozenset({StepKind.MASK, StepKind.BIAS, StepKind.COPY, StepKind.LOSS})


def kernel_of(graph: Graph, step: Step) -> Kernel:
    """Return what a step is counted under."""
    return step.kind, None if step.kind in ANY_OP else graph.op(step.op).kind


def work_of(graph: Graph, step: Step, scheme: SparseScheme) -> int:
    """Return a step's work: multiply-accumulates of weighted layers, window elements of poolings, else elements."""
    op = graph.op(step.op)
    if step.kind in ANY_OP:
        return op.out_shape.elements
    if step.kind is StepKind.WEIGHT:
        return op.macs * scheme.of(op.name).rows // op.out_shape.channels
    return op.macs if op.kind in WEIGHTED else _elements(op)


def _elements(op: KernelCall) -> int:
    window = 1 if op.kind is OpKind.ADD else op.kernel[0] * op.kernel[1]
    return op.out_shape.elements * window


M4F: Mapping[Kernel, float] = {
    (StepKind.FORWARD, OpKind.CONV): 2.3, (StepKind.FORWARD, OpKind.DEPTHWISE): 5.7,
    (StepKind.FORWARD, OpKind.CLASSIFIER): 6.0, (StepKind.FORWARD, OpKind.ADD): 30.1,
    (StepKind.FORWARD, OpKind.AVERAGE_POOL): 16.2, (StepKind.FORWARD, OpKind.MAX_POOL): 22.6,
    (StepKind.INPUT, OpKind.CONV): 4.0, (StepKind.INPUT, OpKind.CLASSIFIER): 19.5,
    (StepKind.INPUT, OpKind.DEPTHWISE): 17.5, (StepKind.INPUT, OpKind.AVERAGE_POOL): 8.8,
    (StepKind.INPUT, OpKind.MAX_POOL): 23.9, (StepKind.WEIGHT, OpKind.CONV): 7.1,
    (StepKind.WEIGHT, OpKind.CLASSIFIER): 59.8, (StepKind.WEIGHT, OpKind.DEPTHWISE): 23.0, (StepKind.MASK, None): 8.1,
    (StepKind.BIAS, None): 6.6, (StepKind.COPY, None): 7.1, (StepKind.LOSS, None): 78.6,
}  # fmt: skip
"""MobileNetV2-w0.35 and, for max pooling, the tests' net of every layer, on the emulated Cortex-M4F with its DSP kernels."""

M0: Mapping[Kernel, float] = {
    (StepKind.FORWARD, OpKind.CONV): 19.0, (StepKind.FORWARD, OpKind.DEPTHWISE): 32.5,
    (StepKind.FORWARD, OpKind.CLASSIFIER): 18.6, (StepKind.FORWARD, OpKind.ADD): 40.3,
    (StepKind.FORWARD, OpKind.AVERAGE_POOL): 20.9, (StepKind.FORWARD, OpKind.MAX_POOL): 34.2,
    (StepKind.INPUT, OpKind.CONV): 136.7, (StepKind.INPUT, OpKind.CLASSIFIER): 413.9,
    (StepKind.INPUT, OpKind.DEPTHWISE): 192.6, (StepKind.INPUT, OpKind.AVERAGE_POOL): 169.9,
    (StepKind.INPUT, OpKind.MAX_POOL): 44.3, (StepKind.WEIGHT, OpKind.CONV): 144.6,
    (StepKind.WEIGHT, OpKind.CLASSIFIER): 705.2, (StepKind.WEIGHT, OpKind.DEPTHWISE): 171.0, (StepKind.MASK, None): 10.7,
    (StepKind.BIAS, None): 98.5, (StepKind.COPY, None): 7.3, (StepKind.LOSS, None): 2435.4,
}  # fmt: skip
"""The digits net and a small residual net on the emulated Cortex-M0: without an FPU the backward part costs 30 times as
much per multiply-accumulate as on an M4F. It skips zero gradients, so its counts depend on the sample by a tenth."""

_BY_BOARD = {"mkr1000": M0, "nrf52840": M4F}


class CoreError(PortError):
    """A board whose core's instruction costs were never measured."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True)
class CoreCosts:
    """One board's core. `watts` are those of the running core, its whole current."""

    name: str
    instructions: Mapping[Kernel, float]
    seconds_per_instruction: float
    watts: float

    def step_instructions(self, graph: Graph, step: Step, scheme: SparseScheme) -> float:
        """Return the estimated instructions of one step."""
        return self.instructions[kernel_of(graph, step)] * work_of(graph, step, scheme)

    def seconds(self, graph: Graph, step: Step, scheme: SparseScheme) -> float:
        """Return the estimated seconds of one step."""
        return self.step_instructions(graph, step, scheme) * self.seconds_per_instruction


def core_costs(board: str) -> CoreCosts:
    """Return the costs of a shipped board's core.

    Raises CoreError for a board without measured kernels, BoardError where there is no such board.
    """
    if board not in _BY_BOARD:
        raise CoreError(f"no instruction counts for {board!r}; there are some for {', '.join(sorted(_BY_BOARD))}")
    found = load_board(board)
    seconds = found["cycles_per_instruction"] / found["clock_hz"]
    return CoreCosts(board, _BY_BOARD[board], seconds, found["compute_watts"] + found["static_watts"])
