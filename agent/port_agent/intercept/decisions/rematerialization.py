"""Rematerialization: how a dropped storage is computed again with the same bits.

A rematerialization keeps nothing alive and is valid only while every storage that it reads is unchanged. Operators that
draw random numbers, write anything (even if their schema does not say so) or take too long have none.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from port_agent.intercept.residency.backing import Backing
from port_agent.intercept.residency.operands import makes_storage, written_arguments
from port_agent.intercept.residency.storages import NEVER, Storage, untyped_storage
from port_planner.exactness.applied_arithmetic import computing_as
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.operators import operator_of
from port_planner.operators.row import Filling
from port_planner.torch_compat.modes import without_modes

_SNAPSHOT_BYTES = 4 << 10
"""Largest size in bytes of operands that are copied into a rematerialization, because small ones are not intercepted
and may change unnoticed.
"""

SMALLEST_BYTES = 256 << 10
"""Bytes below which results are paged: each rematerialization costs a few microseconds at each operator."""

MAX_REMAT_SHARE = 0.5
"""Share of its paging time that recomputing a result may take; paging overlaps with computation,
but recomputing does not.
"""

_HELD_SHARE = 0.5
"""Share of a result's size that sources which nothing else needs may take if they are kept instead of it."""


class StorageRemat:
    """One call of an operator, with its tensors as weak storages and geometry.

    `sources`: the intercepted storages that it reads.
    """

    __slots__ = (
        "_args",
        "_arithmetic",
        "_backing",
        "_func",
        "_kwargs",
        "_versions",
        "_writes",
        "sources",
        "workspace_bytes",
        "writes",
    )

    def __init__(
        self,
        func: Any,
        args: "list[_Argument]",
        kwargs: "dict[str, _Argument]",
        sources: tuple[Storage, ...],
        backing: Backing,
        storage: Storage,
        workspace_bytes: int,
    ) -> None:
        self._func, self._args, self._kwargs, self.sources = func, args, kwargs, sources
        self.workspace_bytes = workspace_bytes
        self._backing = backing
        self._versions = tuple(s.version for s in sources)
        self._writes = tuple(_sealed(backing, s) for s in sources)
        self.writes = _sealed(backing, storage)
        self._arithmetic = arithmetic()

    def possible(self, storage: Storage) -> bool:
        """Return whether its sources are unchanged and will exist when `storage` is needed next.

        Sources that nothing else needs would be kept for it, which is only done if they are much smaller, as a bfloat16
        copy is compared with its float32 result.
        """
        need = storage.next_use
        if need is None or need == NEVER or any(not dependent.resident for dependent in storage.dependents or ()):
            return False
        for source, version in zip(self.sources, self._versions, strict=True):
            if source.version != version or source.ref() is None or not (source.resident or source.clean):
                return False
            if source.birth is not None and source.next_use is None:
                return False
        memory = storage.ref()
        if memory is None or not (self._backing.unwritten(storage, memory, self.writes) and self.unwritten()):
            return False
        return sum(source.nbytes for source in self.kept_for(storage)) <= _HELD_SHARE * storage.nbytes

    def unwritten(self) -> bool:
        """Return whether only operators have written to its sources since."""
        return all(
            (memory := source.ref()) is not None and self._backing.unwritten(source, memory, writes)
            for source, writes in zip(self.sources, self._writes, strict=True)
        )

    def kept_for(self, storage: Storage) -> list[Storage]:
        """Return the sources that the program itself does not need as long as `storage`."""
        need = NEVER if storage.next_use is None else storage.next_use
        return [
            s for s in self.sources if s.birth is not None and (s.next_use is None or not need <= s.next_use < NEVER)
        ]

    def take_hold(self, storage: Storage) -> tuple[torch.UntypedStorage, ...]:
        """Return strong references to its sources, which then remember that this storage depends on them."""
        for source in self.sources:
            if source.dependents is None:
                source.dependents = weakref.WeakSet()
            source.dependents.add(storage)
        return tuple(memory for memory in (source.ref() for source in self.sources) if memory is not None)

    def run(self) -> torch.UntypedStorage:
        """Return a storage with the recomputed bytes; every source must be resident."""
        with without_modes(), torch.no_grad(), computing_as(self._arithmetic):
            made = self._func(*[a() for a in self._args], **{k: a() for k, a in self._kwargs.items()})
        return untyped_storage(made[0] if isinstance(made, tuple) else made)


_Argument = Callable[[], Any]
"""An argument of a recorded call that keeps no intercepted storage alive."""


def _sealed(backing: Backing, storage: Storage) -> int:
    memory = storage.ref()
    writes = None if memory is None else backing.seal(storage, memory)
    if writes is None:
        raise _NotRepeatableError
    return writes


class _NotRepeatableError(Exception):
    """An argument that might have another value when the call is repeated."""


@cache
def repeatable(func: Any) -> bool:
    """Return whether an operator gives the same bits again from the same operands, without side effects.

    The result of operators that cast inside also depends on the autocast setting at the time.
    """
    known = operator_of(func._schema.name)
    return (
        func._schema.name.startswith("aten::")
        and known.repeatable
        and known.fill is not Filling.NOTHING
        and not written_arguments(func)
        and torch.Tag.nondeterministic_seeded not in func.tags
        and makes_storage(func)
        and known.shape_only is None
        and not known.casts_inside
    )


def remat_of(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    inputs: Sequence[Storage],
    storage: Storage,
    made: Any,
    backing: Backing,
    *,
    workspace_bytes: int,
) -> StorageRemat | None:
    """Return how `storage`, the only large result of a repeatable call, could be computed again; None if it cannot."""
    output = made[0] if isinstance(made, tuple) else made
    sources = tuple(dict.fromkeys(inputs))
    if not isinstance(output, torch.Tensor) or id(untyped_storage(output)) != storage.key or not sources:
        return None
    if any(s.pins > 0 for s in sources):
        return None  # a pointer to it was handed out: it may be written without the dispatcher
    if output.storage_offset() != 0 or storage.nbytes != output.numel() * output.element_size():
        return None
    followed = {source.key for source in sources}
    try:
        return StorageRemat(
            func,
            [_argument(a, followed) for a in args],
            {k: _argument(a, followed) for k, a in kwargs.items()},
            sources,
            backing,
            storage,
            workspace_bytes,
        )
    except _NotRepeatableError:
        return None


def _argument(value: Any, followed: set[int]) -> _Argument:
    if isinstance(value, torch.Tensor):
        return _tensor(value, followed)
    if isinstance(value, (list, tuple)):
        parts = [_argument(part, followed) for part in value]
        return lambda: [part() for part in parts]
    return lambda: value


def _tensor(value: torch.Tensor, followed: set[int]) -> _Argument:
    if value.is_conj() or value.is_neg() or value.layout is not torch.strided:
        raise _NotRepeatableError
    storage = untyped_storage(value)
    if id(storage) not in followed:
        if value.numel() * value.element_size() > _SNAPSHOT_BYTES or not value.is_contiguous():
            raise _NotRepeatableError
        snapshot = value.detach().clone()
        return lambda: snapshot
    ref = weakref.ref(storage)
    dtype, size, stride, offset = value.dtype, value.size(), value.stride(), value.storage_offset()

    def tensor() -> torch.Tensor:
        memory = ref()
        if memory is None:
            raise RuntimeError("a storage is recomputed from one that is gone")
        return torch.empty(0, dtype=dtype).set_(memory, offset, size, stride)

    return tensor
