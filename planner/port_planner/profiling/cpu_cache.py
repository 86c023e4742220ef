"""What the processor's cache contains during a step, so that operators are timed with operands as cold as in a step.

An operator that runs repeatedly on the same tensors finds them in the cache. In a step, weights and saved activations
come from memory. Timed hot, a step of small operators looks a quarter faster than it is.
"""

import contextlib
from pathlib import Path

import torch

from port_planner.ir.graph import StepGraph

UNKNOWN_CACHE_BYTES = 4 << 20
"""Cache size assumed if the processor reports none: a Jetson Orin's last level."""
LARGEST_CACHE_BYTES = 32 << 20
"""Largest cache size that is assumed.

A process rarely has more to itself, and sweeping more takes longer than the operators.
"""


def last_level_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of the largest cache that Linux lists for the first core (ABI: sysfs-devices-system-cpu)."""
    sizes = []
    for path in folder.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return min(max(sizes, default=UNKNOWN_CACHE_BYTES), LARGEST_CACHE_BYTES)


def cold_operands(graph: StepGraph, cache_bytes: int) -> tuple[frozenset[int], ...]:
    """Return, for each op, the storages among its operands that the cache has lost, because more than
    its size was touched since.
    """
    size = [s.nbytes for s in graph.storages]
    traffic = 0
    touched: dict[int, int] = {}
    cold = []
    for op, read, created in zip(graph.ops, graph.reads, graph.creates, strict=True):
        cold.append(frozenset(s for s in read if s not in touched or traffic - touched[s] > cache_bytes))
        around = {*read, *created, *op.writes}
        traffic += sum(size[s] for s in around)
        touched.update(dict.fromkeys(around, traffic))
    return tuple(cold)


class Sweep:
    """Empties the cache."""

    def __init__(self, cache_bytes: int) -> None:
        self._filler = torch.zeros(2 * cache_bytes // 4)
        self.nbytes = self._filler.nbytes

    def __call__(self) -> None:
        """Remove everything from the cache."""
        self._filler.add_(1)
