"""The memory that one operator takes: predicted before it runs, measured while it runs, and
reported if it does not fit.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from port_agent.intercept.dispatch.traits import OperatorTraits
from port_agent.intercept.residency.device_memory import DeviceBudget, OperatorMeter
from port_agent.intercept.residency.memory import BudgetTooSmallError, ProcessBudget
from port_agent.intercept.residency.operands import known_bytes, result_bytes, tensors_in
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage
from port_planner.base.errors import program_line
from port_planner.base.units import format_bytes
from port_planner.exactness.half_products import report_once
from port_planner.operators.row import Cost

_PACKING = (Cost.PRODUCT, Cost.CONVOLUTION, Cost.CONVOLUTION_BACKWARD)
"""Operators whose kernels copy operands into their own layout."""

_COPIED_BY_BLOCK = (torch.float32, torch.float64)

_UNKNOWN_WORKSPACE = 1.0
"""Expected workspace of an operator that was not seen before, as a share of its operands' size."""

_PRODUCT_WORKSPACE_BYTES = 32 << 20
"""Largest workspace in bytes of a product in 32 or 64 bits, for any operands, because it copies them block by block.

At most 9 MiB were measured for heads of 108 and 519 MiB; in bfloat16 a whole operand is copied.
"""

_BLOCKWISE, _BLOCKWISE_WORKSPACE_BYTES = "port_agent::grid_", 12 << 20
"""Our own operators over quantized weights, and their expected workspace in bytes: a decoded block, its packed copy and
its product. 10.6 MiB were measured for 256 rows; without this estimate, it exceeded a budget of 380 MiB by 4.
"""

_BLOCK_COLUMNS = 128

_REPORT_SHARE = 0.05
"""Share of the budget below which a shortage is only counted: estimates are not more precise, and
limits have a larger margin.
"""


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """An operator that alone takes more than a RAM budget leaves for tensors.

    `line`: calling line of the program, or "".
    """

    operator: str
    line: str
    needed_bytes: int
    """Bytes that it needs at once: operands, results and workspace."""
    operand_bytes: int
    tensor_bytes: int
    """Bytes that the budget left for tensors."""
    ram_bytes: int

    def __str__(self) -> str:
        place = f"{self.line}: " if self.line else ""
        return (
            f"{place}{self.operator} needs {format_bytes(self.needed_bytes)} at once "
            f"({format_bytes(self.operand_bytes)} of operands)"
        )


def report_shortage(lack: MemoryShortage) -> None:
    """Report on standard error what a program needs to run its operators whole."""
    missing_bytes = lack.needed_bytes - lack.tensor_bytes
    sys.stderr.write(
        f"port-agent: {lack}; the budget of {format_bytes(lack.ram_bytes)} leaves "
        f"{format_bytes(lack.tensor_bytes)} for tensors; give {format_bytes(lack.ram_bytes + missing_bytes)}, "
        "or smaller batches\n"
    )


class OperatorMemory:
    """Predicts the workspace of operators, under `process`'s budget if there is one; `meter` measures it."""

    def __init__(
        self, residency: Residency, process: ProcessBudget | DeviceBudget | None, meter: OperatorMeter
    ) -> None:
        self._residency, self._process = residency, process
        self._meter = meter
        self._workspace_shares: dict[tuple[int, torch.dtype | None], float] = {}
        """The largest workspace of each operator, for each data type, as a share of its operands, at most 1."""
        self._beyond_operands: dict[tuple[tuple[int, torch.dtype | None], int], int] = {}
        """Workspaces that exceeded the operands, by the size of the operands; other sizes are unknown."""
        self._reported: set[str] = set()
        self.on_shortage: Callable[[MemoryShortage], None] = report_shortage
        """Function that is called once for each operator that runs although it takes more than the budget leaves."""

    def expected_bytes(
        self, traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Storage]
    ) -> int:
        """Return the expected bytes of the result and workspace of an operator that no trace contains."""
        func = traits.func
        made = (result_bytes if self._residency.pressed else known_bytes)(func, args, kwargs)
        if made is None:
            made = max((s.nbytes for s in inputs), default=0) if traits.makes_storage else 0
        kind, operand_bytes = _kind(traits, args), sum(s.nbytes for s in inputs)
        share = self._workspace_shares.get(kind)
        if share is None:
            share = 0.0
            if traits.known.cost in _PACKING and kind[1] is not None:
                report_once(kind[1])
            if self._process is not None and traits.known.cost in _PACKING:
                self._process.expect_product()
                share = _UNKNOWN_WORKSPACE
            if self._process is not None and traits.name.startswith(_BLOCKWISE):
                return made + max(_BLOCKWISE_WORKSPACE_BYTES, _block_bytes(args))
        besides = int(share * operand_bytes)
        if traits.known.factors is not None and all(t.dtype in _COPIED_BY_BLOCK for t in tensors_in(args)):
            besides = min(besides, _PRODUCT_WORKSPACE_BYTES)
        return made + max(besides, self._beyond_operands.get((kind, operand_bytes), 0))

    def begin(self) -> None:
        """Begin to measure, before an operator runs."""
        self._meter.begin()

    def end(self, made_bytes: int) -> int:
        """Return the bytes that the operator took besides its operands and the `made_bytes` of its results."""
        return self._meter.end(made_bytes)

    def took(
        self,
        traits: OperatorTraits,
        args: Sequence[Any],
        inputs: Sequence[Storage],
        workspace_bytes: int,
        mapped_bytes: int = 0,
    ) -> None:
        """Record an operator's workspace, for its next run on other operands; `mapped_bytes` of it belong to a
        file that it read in place.
        """
        if workspace_bytes:
            kind, operand_bytes = _kind(traits, args), sum(s.nbytes for s in inputs)
            share = workspace_bytes / max(operand_bytes, workspace_bytes)
            self._workspace_shares[kind] = max(self._workspace_shares.get(kind, 0.0), share)
            if (computed_bytes := workspace_bytes - mapped_bytes) > operand_bytes:
                alike = kind, operand_bytes
                self._beyond_operands[alike] = max(self._beyond_operands.get(alike, 0), computed_bytes)

    def short(self, name: str, held: Sequence[Storage], need_bytes: int) -> None:
        """Report that an operator takes `need_bytes` beside the operands `held`, which exceeds the limit.

        With a strict budget, raise BudgetTooSmallError if the process would exceed it.
        """
        process = self._process
        if process is None or (name in self._reported and not process.strict):
            return
        held_bytes, tensor_bytes = sum(s.nbytes for s in set(held)), int(self._residency.limit_bytes)
        missing_bytes = held_bytes + need_bytes - tensor_bytes
        if not process.strict and missing_bytes < _REPORT_SHARE * process.ram_bytes:
            return
        lack = MemoryShortage(
            name, program_line(), held_bytes + need_bytes, held_bytes, tensor_bytes, process.ram_bytes
        )
        if not process.strict:
            self._reported.add(name)
            self.on_shortage(lack)
            return
        lacking_bytes = process.lacking_bytes(need_bytes)
        if lacking_bytes > 0:
            raise BudgetTooSmallError(
                f"{lack}, which is {format_bytes(lacking_bytes)} more than the budget of "
                f"{format_bytes(process.ram_bytes)} has; give "
                f"{format_bytes(process.ram_bytes + max(missing_bytes, lacking_bytes))}"
            )


def _block_bytes(args: Sequence[Any]) -> int:
    """Return the bytes of a block of columns of a weight with many rows, such as a head's, in 32
    bits with its packed copy.
    """
    return 2 * _BLOCK_COLUMNS * max(t.shape[0] for t in tensors_in(args) if t.dim() == 2) * torch.float32.itemsize


def _kind(traits: OperatorTraits, args: Sequence[Any]) -> tuple[int, torch.dtype | None]:
    """Return what determines the kernel: the operator, and the data type of its first tensor.

    Half precision copies more.
    """
    first = next(tensors_in(args), None)
    return traits.number, None if first is None else first.dtype
