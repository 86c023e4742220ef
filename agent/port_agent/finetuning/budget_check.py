"""Whether the budget suffices: said before the first update, in figures, with what helps."""

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

WORKING_BYTES = 64 << 20
"""What the process grows by once kernels run, where all code was given back before: their code, workspaces, and what is remembered of
the steps. 65 MiB for Qwen2.5-0.5B."""

MOMENTS = 2
"""Of AdamW, for each trained number, in 32 bits."""

_FEW_ROWS = 64
"""Of the head at a time: what is advised where logits take most."""

_HARDLY = 0.01
"""Share of the budget by which the process may pass it and go on: code pages come in as they are run, between two looks."""

_STEP_BYTES = 10 << 20
"""Budgets that are advised are rounded up to multiples of it."""


class BudgetCheck:
    """The budget of this process, if it has one of RAM."""

    def __init__(self, options: FinetuneOptions) -> None:
        self._options = options
        self._process = strict_budget()
        self._noted = self._in_blocks = False

    def tensor_bytes(self) -> int | None:
        """Return how much is left for tensors once kernels run, the model being there and nothing trained yet; None without a budget."""
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
        """See that batches of so many rows can be trained on, the model being there and nothing trained yet; `tokens`: some of one.

        Where only the head on all rows at once is too much, it runs on fewer at a time, and what is to be said of that is returned;
        each of the numbers of rows that will be `met` is compared then. Raises FinetuneError where that, too, is too much, or where no
        blocks of one of those numbers have its bits.
        """
        process = self._process
        if process is None:
            return None
        held = process.held_bytes()
        small = sum((1 + MOMENTS) * t.nbytes for t in trained if t.nbytes < SMALLEST_BYTES)
        beside = held + WORKING_BYTES + small
        at_once = None
        may_run_in_blocks = loss.may_run_in_blocks(tokens)  # first: it sees what the head takes
        if may_run_in_blocks and min_ram_for(beside + loss.bytes_at_once(rows)) > process.ram_bytes:
            at_once = rows_that_fit(loss, rows, beside, process.ram_bytes)
        if min_ram_for(beside + loss.bytes_at_once(rows, at_once)) <= process.ram_bytes:
            return (
                self._run_in_blocks(loss, rows, at_once, met()) if isinstance(loss, LearnedLoss) and at_once else None
            )
        raise _too_little(process.ram_bytes, held, small, loss, rows, at_once)

    def check_least(self, loss: LearnedLoss, rows: int) -> None:
        """Raise FinetuneError where the budget is too small whatever is trained and however few rows the head runs on at a time.

        Asked before something is made that takes long; `check` sees the rest, the model being whole.
        """
        process = self._process
        if process is None:
            return
        held, at_once = process.held_bytes(), None if self._options.head_rows else MIN_ROWS
        if min_ram_for(held + WORKING_BYTES + loss.bytes_at_once(rows, at_once)) > process.ram_bytes:
            raise _too_little(process.ram_bytes, held, 0, loss, rows, at_once)

    def _run_in_blocks(self, loss: LearnedLoss, rows: int, most: int, met: Collection[int]) -> str:
        """Have the head run on blocks of rows, compared here; return what is to be said. Raises FinetuneError."""
        self._in_blocks = True
        whole_bytes = loss.bytes_at_once(rows)
        with without_prefetch():
            head_rows = loss.run_in_blocks(most)
            blocks = head_rows.blocks(rows)
            for number in sorted(met, reverse=True):
                head_rows.blocks(number)
        return (
            f"the head runs on {blocks[0][1]} rows at a time: all {rows} take {format_bytes(whole_bytes)} at once, which the budget has no "
            "room for; the bits are the same, as compared on this device"
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raise FinetuneError, with what helps, where the block meets what does not fit."""
        try:
            yield
        except BudgetTooSmallError as error:
            raise FinetuneError(f"{error}, {self._remedies()}") from error

    def check_peak(self) -> str | None:
        """Return what is to be said, once, where the process took hardly more than the budget; raise FinetuneError where it took more."""
        process = self._process
        if process is None or (peak := peak_resident_bytes()) <= process.ram_bytes:
            return None
        over_bytes = peak - process.ram_bytes
        took = f"this process took {format_bytes(peak)}, {format_bytes(over_bytes)} more than {format_bytes(process.ram_bytes)}"
        if over_bytes > _HARDLY * process.ram_bytes:
            raise FinetuneError(f"{took}; give --ram {_advised(min_ram_for(peak))}, {self._remedies()}")
        noted, self._noted = self._noted, True
        return None if noted else f"{took}, and goes on"

    def _remedies(self) -> str:
        fewer = f"--head-rows {_FEW_ROWS}, " if self._options.head_rows is None and not self._in_blocks else ""
        return f"{fewer}a shorter --seq-len or a smaller --batch"


def rows_that_fit(
    loss: LearnedLoss | LabelLoss | PreferenceLoss, rows: int, beside_bytes: int, ram_bytes: int
) -> int | None:
    """Return on how many of some rows the head runs at a time, within a budget of which so much is taken by others.

    None: on all, as it would. The fewest where none fit.
    """
    for at_once in (None, *(most for most in AT_ONCE if most < rows)):
        if min_ram_for(beside_bytes + loss.bytes_at_once(rows, at_once)) <= ram_bytes:
            break
    return at_once


def _too_little(
    ram_bytes: int,
    held_bytes: int,
    small_bytes: int,
    loss: LearnedLoss | LabelLoss | PreferenceLoss,
    rows: int,
    at_once: int | None,
) -> FinetuneError:
    """Return the error for a budget in which this process, kernels, what is small of the trained state and the head have no room."""
    logits_bytes, at_once = loss.bytes_at_once(rows, at_once), loss.rows_at_once(rows, at_once)
    least = min_ram_for(held_bytes + WORKING_BYTES + small_bytes + logits_bytes)
    fewer = "" if at_once <= _FEW_ROWS else f", or --head-rows {_FEW_ROWS}"
    return FinetuneError(
        f"{format_bytes(ram_bytes)} is too little: this process takes {format_bytes(held_bytes)} before the first update, running kernels "
        f"about {format_bytes(WORKING_BYTES)}, gradients and moments that stay {format_bytes(small_bytes)}, the logits of {at_once} tokens "
        f"with their loss {format_bytes(logits_bytes)}; give --ram {_advised(least)}{fewer}, or a shorter --seq-len"
    )


def _advised(nbytes: int) -> str:
    return f"{-(-nbytes // _STEP_BYTES) * _STEP_BYTES >> 20}M"
