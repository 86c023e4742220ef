"""Tensors that need more memory when packed than their plan reserves, or much less, step after step."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from port_agent.training.packing_probe import MARGIN, WORTH_PACKING
from port_agent.training.step_packing import Overflow
from port_planner.ir.graph import StepGraph

WATCHED_STEPS = 4
OFTEN = 3
"""Number of the last steps with overflows that shows a change of the data; a single batch may spill."""
SPARSE_STEPS = 50
"""Number of consecutive steps with unused reserved memory before it is used otherwise; one
dense batch would then spill.
"""
UNUSED = 0.25
"""Unused share of the reserved memory, beyond `MARGIN`, that justifies another plan."""


class PackingDrift:
    """Overflows and unused reserved memory in the last steps of one graph.

    `reserved`: bytes by storage and version; None: not packed.
    """

    def __init__(self, graph: StepGraph, reserved: Mapping[tuple[int, int], int | None]) -> None:
        self._graph = graph
        self._reserved = dict(reserved)
        self._steps: deque[set[tuple[int, int]]] = deque(maxlen=WATCHED_STEPS)
        self._most: dict[tuple[int, int], int | None] = {}
        self._sparse: dict[tuple[int, int], tuple[int, int]] = {}
        """Number of consecutive steps with unused reserved memory, and the most bytes that they used."""

    def note(self, overflows: Iterable[Overflow], sizes: Mapping[tuple[int, int], int]) -> None:
        """Record a step's overflows, and the bytes that other contents used."""
        here = set()
        for one in overflows:
            key = one.storage, one.version
            here.add(key)
            known = self._most.get(key, 0)
            self._most[key] = None if known is None or one.needed_bytes is None else max(known, one.needed_bytes)
            self._sparse.pop(key, None)
        self._steps.append(here)
        for key, size in sizes.items():
            reserved = self._reserved.get(key)
            if reserved is None or _with_margin(size) > (1 - UNUSED) * reserved:
                self._sparse.pop(key, None)
            else:
                steps, most = self._sparse.get(key, (0, 0))
                self._sparse[key] = steps + 1, max(most, size)

    def take(self) -> dict[tuple[int, int], int | None]:
        """Return what to reserve from now on, by storage and version, if overflows persist, and reset.

        None: contents that save too little to be packed, or cannot be.
        """
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for step in self._steps:
            for key in step:
                counts[key] += 1
        found = {key: self._wanted(key) for key, count in counts.items() if count >= OFTEN}
        if found:
            self._steps.clear()
            self._most.clear()
        self._reserved.update(found)
        return found

    def take_sparser(self) -> dict[tuple[int, int], int | None]:
        """Return the sizes that would suffice, by storage and version, if much of the reserved memory stays unused.

        Whether or not they are adopted, they are returned again only if much less suffices once more.
        """
        found = {key: _with_margin(most) for key, (steps, most) in self._sparse.items() if steps >= SPARSE_STEPS}
        for key in found:
            del self._sparse[key]
        self._reserved.update(found)
        return dict(found)

    def _wanted(self, key: tuple[int, int]) -> int | None:
        nbytes, most = self._graph.storages[key[0]].nbytes, self._most[key]
        if most is None:
            return None
        wanted = _with_margin(most)
        return wanted if wanted <= WORTH_PACKING * nbytes else None


def _with_margin(nbytes: int) -> int:
    return math.ceil((1 + MARGIN) * nbytes)
