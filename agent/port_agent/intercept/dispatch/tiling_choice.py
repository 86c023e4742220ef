"""How an operator runs: whole, in tiles, or reading an operand from its file part by part."""

from collections.abc import Sequence
from typing import Any

from port_agent.intercept.dispatch.operator_memory import OperatorMemory
from port_agent.intercept.dispatch.traits import OperatorTraits
from port_agent.intercept.residency import dispatch_keys
from port_agent.intercept.residency.operands import makes_storage
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage, StorageTable
from port_agent.intercept.residency.trace import Entry
from port_agent.intercept.tiles.elementwise import TILED_FROM, OperatorTiling, run_tiled, tiling_of
from port_agent.intercept.tiles.products import MappedProduct, MappedProducts
from port_agent.intercept.tiles.rows import MappedCopy, MappedRows, mapped_copy, mapped_rows
from port_planner.torch_compat.modes import seeing

MappedTiling = MappedProduct | MappedRows | MappedCopy
"""An operator that reads an operand from its mapped file, a part at a time."""


class TilingChoice:
    """Chooses how each operator runs, and makes its operands resident."""

    def __init__(self, table: StorageTable, residency: Residency, op_memory: OperatorMemory) -> None:
        self._table, self._residency, self.op_memory = table, residency, op_memory
        self._products = MappedProducts(table, residency.make_free)

    def tiled_call(
        self, traits: OperatorTraits, func: Any, args: Sequence[Any], kwargs: dict[str, Any], input_bytes: int
    ) -> tuple[OperatorTiling | None, MappedTiling | None]:
        """Return the tiling of an operator that is too large to run whole, or how it reads from a file in place."""
        limit_bytes = self._residency.limit_bytes
        copy = mapped_copy(func, args, kwargs, self._table) if traits.known.copies else None
        if copy is not None and self._residency.could_fit(copy.need_bytes):
            return None, copy
        if traits.tiled and (traits.takes_lists or input_bytes > limit_bytes / TILED_FROM):
            tiling = tiling_of(func, args, kwargs, limit_bytes)
            if tiling is not None:
                return tiling, None
        if traits.maps_file:
            product = self._products.of(func, args, kwargs, limit_bytes)
            return None, product or mapped_rows(func, args, kwargs, self._table)
        return None, copy

    def ensure_resident(
        self, traits: OperatorTraits, inputs: list[Storage], mapped: MappedTiling | None, *, whole: bool
    ) -> tuple[list[Storage], MappedTiling | None]:
        """Make operands resident.

        Return them, and the mapped tiling, or None instead of it if its bits differ from the whole's.
        """
        held = _needed_resident(traits, inputs, mapped, whole=whole)
        self._residency.ensure_resident(held)
        if isinstance(mapped, MappedProduct) and not self._products.has_bits_of_whole(mapped):
            self._residency.ensure_resident(inputs)
            return inputs, None
        return held, mapped

    def make_free(
        self,
        traits: OperatorTraits,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: list[Storage],
        held: list[Storage],
        entry: Entry | None,
        mapped: MappedTiling | None,
        *,
        writes: bool,
    ) -> None:
        """Free memory for the result and workspace of an operator that runs whole. Raises if there is not enough."""
        if mapped is not None:
            need_bytes = mapped.need_bytes
        elif entry is not None:
            need_bytes = entry.need_bytes
        else:
            need_bytes = self.op_memory.expected_bytes(traits, args, kwargs, inputs)
        if not (need_bytes or writes):
            self._residency.try_make_free()
        elif not self._residency.make_free(need_bytes):
            self.op_memory.short(traits.name, held, need_bytes)
        if mapped is not None:
            self._residency.before_mapping(mapped.mapped_bytes)

    def call(self, traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Storage]) -> Any:
        """Call an operator that runs whole."""
        return call_whole(traits, args, kwargs)

    def ran(self) -> None:
        """Record that an operator ran, and check the available memory on host and device."""

    def run_tiles(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tiling: OperatorTiling,
        inputs: list[Storage],
        written: list[Storage],
    ) -> Any:
        """Run an operator in tiles. Operands that do not fit are evicted, or stay paged out.

        They go to the page file and are not recomputed, because each tile of them must be readable.
        """
        residency = self._residency
        trust_trace, residency.trust_trace = residency.trust_trace, False
        for storage in inputs:
            storage.pins -= 1
        try:
            try:
                reserve_bytes = tiling.buffers_bytes
                if makes_storage(func) and residency.could_fit(reserve_bytes + tiling.made_bytes):
                    reserve_bytes += tiling.made_bytes
                residency.make_free(reserve_bytes)
            finally:
                residency.trust_trace = trust_trace
                for storage in inputs:
                    storage.pins += 1
            return run_tiled(func, args, kwargs, tiling, written, residency, self._table)
        finally:
            for storage in written:
                storage.clean = not storage.resident


def _needed_resident(
    traits: OperatorTraits, inputs: list[Storage], mapped: MappedTiling | None, *, whole: bool
) -> list[Storage]:
    """Return the operands that must be resident: those that are not read by rows or in parts from a mapping."""
    if mapped is not None:
        return [storage for storage in inputs if storage is not mapped.storage]
    if traits.reads_rows:
        return [storage for storage in inputs if not storage.in_file]
    return inputs if whole else [s for s in inputs if s.resident or not s.clean or s.mapped]


def call_whole(traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator so that its kernel sees the same as without a mode."""
    keys = dispatch_keys.hidden_keys(traits.name, args, counting=traits.counts_inside)
    if keys:
        with seeing(keys):
            return traits.func(*args, **kwargs)
    return traits.func(*args, **kwargs)
