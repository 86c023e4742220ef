"""Whether the budget suffices, reported before the first update, in figures and with remedies."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from port_agent.finetuning.accumulation.head_loss import LabelLoss, LearnedLoss
from port_agent.finetuning.accumulation.head_rows import AT_ONCE, MIN_ROWS
from port_agent.finetuning.accumulation.preference_loss import PreferenceLoss
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.intercept.budget import strict_budget, without_prefetch
from port_agent.intercept.residency.memory import BudgetTooSmallError, min_ram_for
from port_agent.intercept.residency.storages import SMALLEST_BYTES
from port_planner.base.process_memory import peak_resident_bytes
from port_planner.base.units import format_bytes
from port_planner.ir.device_kinds import CPU

WORKING_BYTES = 64 << 20
"""Bytes by which the process grows once kernels run, after all code pages were released: their code, workspaces, and the trace of the
steps. Qwen2.5-0.5B takes 65 MiB.
"""

MOMENTS = 2
"""AdamW's moments for each trained number, in 32 bits."""

_FEW_ROWS = 64
"""Rows of the head at a time that are suggested if logits take most."""

_HARDLY = 0.01
"""Share of the budget that the process may exceed and still continue, because code pages are loaded as they run, between two checks."""

_NOT_REPEATABLE = "deterministic implementation"
"""Text of torch's error for an operator that gives other bits each time."""

_STEP_BYTES = 10 << 20
"""Suggested budgets are rounded up to multiples of this."""


class BudgetCheck:
    """The budget of this process, if it has a budget of RAM."""

    def __init__(self, options: FinetuneOptions) -> None:
        self._options = options
        self._process = strict_budget()
        self._noted = self._in_blocks = False

    def tensor_bytes(self) -> int | None:
        """Return the bytes left for tensors once kernels run, after the model is loaded and before training; None
        without a budget.
        """
        process = self._process
        return None if process is None else process.ram_bytes - process.held_bytes() - WORKING_BYTES

    def check(
        self,
        loss: LearnedLoss | LabelLoss | PreferenceLoss,
        trained: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        rows: int,
        met: Callable[[], Collection[int]] = tuple,
    ) -> str | None:
        """Check that batches of `rows` rows can be trained, after the model is loaded and before training. `tokens`: some of a batch.

        If only the head on all rows at once is too large, it runs on fewer at a time. Each number of rows in `met` is then compared, and a
        note to print is returned. Raises FinetuneError if that is still too much, or if no blocks of one of those numbers have the same
        bits.
        """
        process = self._process
        if process is None:
            return None
        held = process.held_bytes()
        if self._options.device != CPU:  # tensors are there; its own budget rejects what does not fit
            _check_host(process.ram_bytes, held)
            return None
        small = sum((1 + MOMENTS) * t.nbytes for t in trained if t.nbytes < SMALLEST_BYTES)
        beside = held + WORKING_BYTES + small
        at_once = None
        may_run_in_blocks = loss.may_run_in_blocks(tokens)  # first, because it measures what the head takes
        if may_run_in_blocks and min_ram_for(beside + loss.bytes_at_once(rows)) > process.ram_bytes:
            at_once = rows_that_fit(loss, rows, beside, process.ram_bytes)
        if min_ram_for(beside + loss.bytes_at_once(rows, at_once)) <= process.ram_bytes:
            return (
                self._run_in_blocks(loss, rows, at_once, met()) if isinstance(loss, LearnedLoss) and at_once else None
            )
        raise _too_little(process.ram_bytes, held, small, loss, rows, at_once)

    def check_least(self, loss: LearnedLoss, rows: int) -> None:
        """Raise FinetuneError if the budget is too small regardless of what is trained and of how many rows the head runs on at a time.

        This is called before anything slow; `check` does the rest once the model is complete.
        """
        process = self._process
        if process is None:
            return
        held, at_once = process.held_bytes(), None if self._options.head_rows else MIN_ROWS
        if min_ram_for(held + WORKING_BYTES + loss.bytes_at_once(rows, at_once)) > process.ram_bytes:
            raise _too_little(process.ram_bytes, held, 0, loss, rows, at_once)

    def _run_in_blocks(self, loss: LearnedLoss, rows: int, most: int, met: Collection[int]) -> str:
        """Make the head run on blocks of rows, compared here; return the note to print. Raises FinetuneError."""
        self._in_blocks = True
        whole_bytes = loss.bytes_at_once(rows)
        with without_prefetch():
            head_rows = loss.run_in_blocks(most)
            blocks = head_rows.blocks(rows)
            for number in sorted(met, reverse=True):
                head_rows.blocks(number)
        return (
            f"the head runs on {blocks[0][1]} rows at a time: all {rows} take {format_bytes(whole_bytes)} at once, "
            "which does not fit into the budget; a comparison on this device gave the same bits"
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raise FinetuneError with remedies if something in the block does not fit."""
        try:
            yield
        except (BudgetTooSmallError, torch.OutOfMemoryError) as error:
            raise FinetuneError(f"{error}, {self._remedies()}") from error
        except RuntimeError as error:
            if _NOT_REPEATABLE not in str(error):
                raise
            raise FinetuneError(
                f"an operator of this model adds in another order each time on {self._options.device} "
                f"({str(error).splitlines()[0]}); train with --device cpu"
            ) from error

    def check_peak(self) -> str | None:
        """Return a note, once, if the process took slightly more than the budget; raise FinetuneError if it took much more."""
        process = self._process
        if process is None or (peak := peak_resident_bytes()) <= process.ram_bytes:
            return None
        over_bytes = peak - process.ram_bytes
        took = f"this process took {format_bytes(peak)}, {format_bytes(over_bytes)} more than {format_bytes(process.ram_bytes)}"
        if over_bytes > _HARDLY * process.ram_bytes:
            raise FinetuneError(f"{took}; give --ram {_advised(min_ram_for(peak))}, {self._remedies()}")
        noted, self._noted = self._noted, True
        return None if noted else f"{took}, and continues"

    def _remedies(self) -> str:
        fewer = f"--head-rows {_FEW_ROWS}, " if self._options.head_rows is None and not self._in_blocks else ""
        return f"{fewer}a shorter --seq-len or a smaller --batch"


def rows_that_fit(
    loss: LearnedLoss | LabelLoss | PreferenceLoss, rows: int, beside_bytes: int, ram_bytes: int
) -> int | None:
    """Return the number of rows on which the head runs at a time, in a budget of which `beside_bytes` are used otherwise.

    None means all rows, the usual case. If no number fits, the smallest is returned.
    """
    for at_once in (None, *(most for most in AT_ONCE if most < rows)):
        if min_ram_for(beside_bytes + loss.bytes_at_once(rows, at_once)) <= ram_bytes:
            break
    return at_once


def _check_host(ram_bytes: int, held_bytes: int) -> None:
    """Raise FinetuneError if a budget cannot hold this process, whose tensors are on a device."""
    least = min_ram_for(held_bytes + WORKING_BYTES)
    if least > ram_bytes:
        raise FinetuneError(
            f"{format_bytes(ram_bytes)} is too little: this process takes {format_bytes(held_bytes)} of the host's memory before the "
            f"first update, running kernels about {format_bytes(WORKING_BYTES)}; give --ram {_advised(least)}"
        )


def _too_little(
    ram_bytes: int,
    held_bytes: int,
    small_bytes: int,
    loss: LearnedLoss | LabelLoss | PreferenceLoss,
    rows: int,
    at_once: int | None,
) -> FinetuneError:
    """Return the error for a budget that cannot hold this process, kernels, the small part of the trained state and the
    head.
    """
    logits_bytes, at_once = loss.bytes_at_once(rows, at_once), loss.rows_at_once(rows, at_once)
    least = min_ram_for(held_bytes + WORKING_BYTES + small_bytes + logits_bytes)
    fewer = "" if at_once <= _FEW_ROWS else f", or --head-rows {_FEW_ROWS}"
    return FinetuneError(
        f"{format_bytes(ram_bytes)} is too little: this process takes {format_bytes(held_bytes)} before the first "
        f"update, running kernels about {format_bytes(WORKING_BYTES)}, resident gradients and moments "
        f"{format_bytes(small_bytes)}, the logits of {at_once} tokens with their loss {format_bytes(logits_bytes)}; "
        f"give --ram {_advised(least)}{fewer}, or a shorter --seq-len"
    )


def _advised(nbytes: int) -> str:
    return f"{-(-nbytes // _STEP_BYTES) * _STEP_BYTES >> 20}M"
