"""Which way an operator runs: whole, in pieces, or reading an operand from its file part by part."""

from collections.abc import Sequence
from typing import Any

from port_agent.follow.decisions.trace import Entry
from port_agent.follow.operands import makes_storage
from port_agent.follow.operator_room import OperatorRoom
from port_agent.follow.parts.piecewise import PIECEWISE_FROM, Pieces, pieces_of, run_piecewise
from port_agent.follow.parts.products import MappedProduct, MappedProducts
from port_agent.follow.parts.rows import MappedCopy, MappedRows, mapped_copy, mapped_rows
from port_agent.follow.patches import dispatch_keys
from port_agent.follow.residency import Residency
from port_agent.follow.storages import Storage, StorageTable
from port_agent.follow.traits import OperatorTraits
from port_planner.torch_compat.modes import seeing

Cut = MappedProduct | MappedRows | MappedCopy
"""An operator that reads an operand where its file is mapped, a part at a time."""


class OperatorWays:
    """Chooses the way of each operator, and has what that takes resident."""

    def __init__(self, table: StorageTable, residency: Residency, room: OperatorRoom) -> None:
        self._table, self._residency, self._room = table, residency, room
        self._products = MappedProducts(table, residency.make_room)

    def in_parts(
        self, traits: OperatorTraits, func: Any, args: Sequence[Any], kwargs: dict[str, Any], input_bytes: int
    ) -> tuple[Pieces | None, Cut | None]:
        """Return the pieces of an operator too large to run whole, or how one reads from a file in place."""
        limit_bytes = self._residency.limit_bytes
        copy = mapped_copy(func, args, kwargs, self._table) if traits.known.copies else None
        if copy is not None and self._residency.could_hold(copy.need_bytes):
            return None, copy
        if traits.in_pieces and (traits.takes_lists or input_bytes > limit_bytes / PIECEWISE_FROM):
            pieces = pieces_of(func, args, kwargs, limit_bytes)
            if pieces is not None:
                return pieces, None
        if traits.cut_from_file:
            product = self._products.of(func, args, kwargs, limit_bytes)
            return None, product or mapped_rows(func, args, kwargs, self._table)
        return None, copy

    def bring(
        self, traits: OperatorTraits, inputs: list[Storage], cut: Cut | None, *, whole: bool
    ) -> tuple[list[Storage], Cut | None]:
        """Make operands resident; return which, and what is left of a cut: nothing where its bits differ from the whole's."""
        held = _to_bring(traits, inputs, cut, whole=whole)
        self._residency.bring(held)
        if isinstance(cut, MappedProduct) and not self._products.has_bits_of_whole(cut):
            self._residency.bring(inputs)
            return inputs, None
        return held, cut

    def make_room(
        self, traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Storage],
        held: list[Storage], entry: Entry | None, cut: Cut | None, *, writes: bool,
    ) -> None:  # fmt: skip
        """Make room for what an operator takes that is run at once. Raises where there is none."""
        if cut is not None:
            need_bytes = cut.need_bytes
        elif entry is not None:
            need_bytes = entry.need_bytes
        else:
            need_bytes = self._room.expected_bytes(traits, args, kwargs, inputs)
        if not (need_bytes or writes):
            self._residency.make_room_if_possible()
        elif not self._residency.make_room(need_bytes):
            self._room.short(traits.name, held, need_bytes)
        if cut is not None:
            self._residency.before_mapping(cut.mapped_bytes)

    def run_pieces(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], pieces: Pieces, inputs: list[Storage],
        written: list[Storage],
    ) -> Any:  # fmt: skip
        """Run an operator in pieces; operands that do not fit leave, or stay away.

        They leave for the page file, not to be recomputed: a piece of them must be there to be read.
        """
        residency = self._residency
        may_recompute, residency.may_recompute = residency.may_recompute, False
        for storage in inputs:
            storage.pins -= 1
        try:
            try:
                room_bytes = pieces.buffers_bytes
                if makes_storage(func) and residency.could_hold(room_bytes + pieces.made_bytes):
                    room_bytes += pieces.made_bytes
                residency.make_room(room_bytes)
            finally:
                residency.may_recompute = may_recompute
                for storage in inputs:
                    storage.pins += 1
            return run_piecewise(func, args, kwargs, pieces, written, residency, self._table)
        finally:
            for storage in written:
                storage.clean = not storage.resident


def _to_bring(
    traits: OperatorTraits, inputs: list[Storage], cut: Cut | None, *, whole: bool
) -> list[Storage]:  # fmt: skip
    """Return which operands must be resident: not those read by row or in pieces from a mapping."""
    if cut is not None:
        return [storage for storage in inputs if storage is not cut.storage]
    if traits.reads_rows:
        return [storage for storage in inputs if not storage.in_file]
    return inputs if whole else [s for s in inputs if s.resident or not s.clean or s.mapped]


def call_whole(traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator whose kernel sees what it would see without a mode."""
    keys = dispatch_keys.hidden_keys(traits.name, args, counting=traits.counts_inside)
    if keys:
        with seeing(keys):
            return traits.func(*args, **kwargs)
    return traits.func(*args, **kwargs)
