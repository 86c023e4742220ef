"""Transfers between the arena and a page medium: page transfers of tensors, and parameters that live on the medium.

A tensor's page is written after its last use before a gap, and read back before the next use. Both transfers
run alongside other rows until a row waits for them. Trained parameters may live on a memory-mapped medium, in
two copies. Every sample reads the complete copy and writes the other, so that an interrupted step leaves the
model of the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from port_planner.base.errors import PortError
from port_planner.mcu.autodiff import PAGE_KINDS, StepKind, TableRow

Window = tuple[int, int]
"""Steps of the program: a transfer starts before the first and is complete before the second."""


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """One page transfer of a tensor. `out` is None if its page already holds the same contents."""

    tensor: str
    out: Window | None
    back: Window


Transfer = tuple[str, int]
"""A page of parameters, and the number of its transfer within a sample, counted from 0."""

TRANSFERS = frozenset({StepKind.PAGE_OUT, StepKind.PAGE_IN})


def transfers(rows: Sequence[TableRow]) -> dict[Transfer, int]:
    """Return the row in which each transfer of parameters starts."""
    found: dict[Transfer, int] = {}
    counts: dict[str, int] = {}
    for index, row in enumerate(rows):
        if row.kind in TRANSFERS and is_parameters(row.page):
            number = counts.get(row.page, 0)
            found[row.page, number] = index
            counts[row.page] = number + 1
    return found


def wait_of(rows: Sequence[TableRow], index: int) -> int:
    """Return the row that waits for the transfer which row `index` starts."""
    return next(
        i for i in range(index, len(rows)) if rows[i].kind is StepKind.PAGE_WAIT and rows[i].page == rows[index].page
    )


def with_transfer_beside(rows: Sequence[TableRow], transfer: Transfer) -> list[TableRow]:
    """Return the rows with a transfer that overlaps one more operator or its bands, before it (in) or after it (out).

    Returns them unchanged if there is no such operator, or if it uses these parameters itself.
    """
    start = transfers(rows)[transfer]
    wait, moved = wait_of(rows, start), list(rows)
    if rows[start].kind is StepKind.PAGE_OUT:
        beside = next((i for i in range(wait, len(rows)) if rows[i].kind not in PAGE_KINDS), None)
        if beside is None:
            return moved
        while rows[beside].part and beside + 1 < len(rows) and rows[beside + 1].part:
            beside += 1
        moved.insert(beside, moved.pop(wait))
        return moved
    beside = next((i for i in reversed(range(start)) if rows[i].kind not in PAGE_KINDS), None)
    if beside is None:
        return moved
    while rows[beside].part and beside and rows[beside - 1].part:
        beside -= 1
    if any(row.parameters == rows[start].output for row in rows[beside:start]):
        return moved
    moved.insert(beside, moved.pop(start))
    return moved


@dataclass(frozen=True, slots=True)
class BoardPaging:
    """Every page transfer of a sample; `parameters`: those of trained layers live on the medium.

    `carried`: the layers whose parameters also stay in the arena from their update to the next training sample, which
    then need not read them. `beside`: parameter transfers that overlap an operator, listed once per operator. The
    others are waited for at once.
    """

    transfers: tuple[PageTransfer, ...] = ()
    parameters: bool = False
    carried: frozenset[str] = frozenset()
    beside: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A place on the medium, in bytes; for parameters, the place within each of the two copies."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MediumLayout:
    """How a model uses the medium `name`: pages of parameters first, in two copies; `size_bytes` includes both."""

    name: str
    pages: tuple[Page, ...]
    parameter_pages: int
    size_bytes: int
    written_bytes: int
    """Written by one training sample, in whole blocks."""

    def index(self, page: str) -> int:
        """Return the number of a page."""
        return next(i for i, found in enumerate(self.pages) if found.name == page)


PARAMETER_USERS = frozenset({StepKind.FORWARD, StepKind.INPUT, StepKind.WEIGHT, StepKind.BIAS})
UPDATES = frozenset({StepKind.WEIGHT, StepKind.BIAS})
CHECKSUMS = "checksums"
"""The arena buffer with a checksum for each page."""


def parameter_name(op: str) -> str:
    """Return the name of a layer's parameters."""
    return f"p:{op}"


def is_parameters(tensor: str) -> bool:
    """Return whether a name is that of a layer's parameters."""
    return tensor.startswith("p:")


def blocks(size_bytes: int, block_bytes: int) -> int:
    """Return the size rounded up to whole blocks."""
    return -(-size_bytes // block_bytes) * block_bytes


class BoardPageError(PortError):
    """Raised for a page that does not hold what its reader needs, a defect of the planner;
    carries the row where it shows.
    """

    def __init__(self, index: int, row: TableRow, problem: str) -> None:
        super().__init__(
            f"row {index} ({row.kind.name} {row.page or row.op}): {problem}; report this, the planner is wrong"
        )
        self.index = index
        self.row = row


Contents = tuple[str, int]
"""A tensor, and how many times it has been written."""


class PageVerifier:
    """Tracks pages of activations and gradients through a table: `held` is what every residency holds now."""

    def __init__(self) -> None:
        self.pages: dict[str, Contents] = {}
        self.leaving: dict[str, tuple[str, Contents]] = {}
        self.coming: dict[str, tuple[str, Contents]] = {}

    def run(self, index: int, row: TableRow, held: dict[str, Contents]) -> None:
        """Run a page row.

        Raises BoardPageError for a page that was never written, or a transfer that nothing waits for.
        """
        if row.kind is StepKind.PAGE_OUT:
            contents = held.get(row.source)
            if contents is None or contents[0] != row.page or row.page in self.coming:
                raise BoardPageError(index, row, f"{row.source} holds {contents}")
            self.leaving[row.page] = row.source, contents
            self.pages[row.page] = contents
        elif row.kind is StepKind.PAGE_IN:
            if row.page not in self.pages:
                raise BoardPageError(index, row, "the page was never written")
            self.coming[row.page] = row.output, self.pages[row.page]
            held.pop(row.output, None)
        else:
            pending = self.leaving if row.source else self.coming
            residency, contents = pending.pop(row.page, ("", ("", 0)))
            if residency != (row.source or row.output):
                raise BoardPageError(
                    index,
                    row,
                    f"waits for {row.source or row.output}, but the current transfer is {residency or 'none'}",
                )
            held[residency] = contents

    def check(self, index: int, row: TableRow, held: Mapping[str, Contents]) -> None:
        """Raise BoardPageError if a row wrote to what a transfer still reads or writes."""
        for residency, contents in self.leaving.values():
            if held.get(residency) != contents:
                raise BoardPageError(index, row, f"writes to {residency}, which is on its way to the medium")
        for residency, _ in self.coming.values():
            if residency in held:
                raise BoardPageError(index, row, f"writes to {residency}, which is on its way from the medium")

    def finish(self, rows: Sequence[TableRow]) -> None:
        """Raise BoardPageError if a transfer is still running after the last row."""
        for page in (*self.leaving, *self.coming):
            raise BoardPageError(len(rows) - 1, rows[-1], f"nothing waits for page {page}")


def verify_parameters(rows: Sequence[TableRow]) -> None:
    """Raise BoardPageError unless paged parameters are current when read, and written back after their last update.

    Both copies are checked: a page is read from the previous sample's copy, whatever this sample has written.
    """
    if not any(row.kind is StepKind.PAGE_OUT and is_parameters(row.page) for row in rows):
        return
    trained = {row.op for row in rows if row.kind in UPDATES}
    updates: dict[str, int] = dict.fromkeys(trained, 0)
    held: dict[str, Contents] = {}
    stored: dict[str, int] = {}
    coming: dict[str, Contents] = {}
    leaving: set[str] = set()
    for index, row in enumerate(rows):
        op = row.page.removeprefix("p:")
        if is_parameters(row.page) and row.kind is StepKind.PAGE_IN:
            held.pop(row.output, None)
            coming[row.output] = (row.page, 0)
        elif is_parameters(row.page) and row.kind is StepKind.PAGE_OUT:
            if held.get(row.source) != (row.page, updates[op]):
                raise BoardPageError(
                    index, row, f"{row.source} holds {held.get(row.source)} after {updates[op]} updates"
                )
            stored[op] = updates[op]
            leaving.add(row.source)
        elif is_parameters(row.page) and row.source:
            leaving.discard(row.source)
        elif is_parameters(row.page):
            held[row.output] = coming.pop(row.output, ("", 0))
        elif row.kind in PARAMETER_USERS and row.op in trained:
            wanted = (parameter_name(row.op), updates[row.op])
            if held.get(row.parameters) != wanted:
                raise BoardPageError(index, row, f"{row.parameters} holds {held.get(row.parameters)}, not {wanted}")
            if row.kind in UPDATES and not row.suspends:
                updates[row.op] += 1
                held[row.parameters] = (wanted[0], updates[row.op])
    for residency in (*coming, *leaving):
        raise BoardPageError(len(rows) - 1, rows[-1], f"nothing waits for {residency}")
    for index, row in enumerate(rows):
        wanted = row.page, updates.get(row.page.removeprefix("p:"), 0)
        if row.carried and (row.kind is not StepKind.PAGE_IN or held.get(row.output) != wanted):
            raise BoardPageError(index, row, f"{row.output} ends with {held.get(row.output)}, not {wanted}")
    for op, count in updates.items():
        if count == 0 or stored.get(op) != count:
            raise BoardPageError(len(rows) - 1, rows[-1], f"the current parameters of {op} are not written back")


def for_training_only(rows: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """Return the rows, marking page rows that come before the loss but that no operator before the loss needs."""
    loss = next((i for i, row in enumerate(rows) if row.kind is StepKind.LOSS), len(rows))
    needed: set[int] = set()
    pages: set[str] = set()
    read = {name for row in rows[:loss] if row.kind is StepKind.FORWARD for name in row.touched}
    for index in reversed(range(loss)):
        row = rows[index]
        if row.kind is StepKind.PAGE_IN and row.output in read:
            needed.add(index)
            pages.add(row.page)
        elif row.kind is StepKind.PAGE_OUT and row.page in pages:
            needed.add(index)
            pages.discard(row.page)
    waited = _waits(rows[:loss], needed)
    return tuple(
        replace(row, training=index < loss and row.kind in PAGE_KINDS and index not in needed | waited)
        for index, row in enumerate(rows)
    )


def _waits(rows: Sequence[TableRow], needed: Iterable[int]) -> set[int]:
    """Return the first wait after each of these transfers."""
    return {wait_of(rows, index) for index in needed}


def medium_layout(
    name: str,
    rows: Sequence[TableRow],
    sizes: Mapping[str, int],
    parameters: Mapping[str, Page],
    copy_bytes: int,
    block_bytes: int,
) -> MediumLayout:
    """Return where every page of a table lies on the medium.

    `sizes`: bytes of each residency that is paged. `parameters`: the pages of parameters; two copies
    of `copy_bytes` come first.
    """
    copies = 2 * copy_bytes if parameters else 0
    pages, at = list(parameters.values()), blocks(copies, block_bytes)
    written = 0
    for row in rows:
        if row.kind is not StepKind.PAGE_OUT:
            continue
        written += blocks(sizes[row.source], block_bytes)
        if not is_parameters(row.page) and all(page.name != row.page for page in pages):
            pages.append(Page(row.page, at, sizes[row.source]))
            at += blocks(sizes[row.source], block_bytes)
    return MediumLayout(name, tuple(pages), len(parameters), at, written)
