"""What of a step could be stored packed while it waits for its next use."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from planner.ir.costs import Codec
from planner.ir.graph import ITEM_BYTES, Role, StepGraph

_CODECS = {"bool": Codec.BITS, "int64": Codec.NARROW}
_PACKED_ITEMS = (1, 2, 4, 8)
"""Sizes of items that the codecs take."""


@dataclass(frozen=True, slots=True)
class Packable:
    """Contents of a storage that lie idle after op `after`, the last to touch their `version`, and the codec for their type."""

    storage: int
    version: int
    after: int
    codec: Codec
    item_bytes: int


def packables(graph: StepGraph, *, least_bytes: int = 1) -> Iterator[Packable]:
    """Yield what could be packed somewhere: contents of temporaries of one type that lie idle for more than one op."""
    types: dict[int, set[str]] = defaultdict(set)
    for value in graph.values:
        types[value.storage].add(value.dtype)
    for s, storage in enumerate(graph.storages):
        item_bytes = ITEM_BYTES[next(iter(types[s]))] if len(types[s]) == 1 else 0
        usable = storage.role is Role.TEMPORARY and s not in graph.kept and storage.nbytes >= least_bytes
        if not usable or item_bytes not in _PACKED_ITEMS or storage.nbytes % item_bytes:
            continue
        codec = _CODECS.get(next(iter(types[s])), Codec.BITMAP)
        ends = {sum(w <= a for w in graph.writers[s]): a for a, b in itertools.pairwise(graph.uses[s]) if b > a + 1}
        for version, after in ends.items():
            yield Packable(s, version, after, codec, item_bytes)
