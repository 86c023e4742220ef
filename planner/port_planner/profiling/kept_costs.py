"""Costs of operators on this machine, stored for later plans: seconds and workspace, by operator and operands.

There is one file in the user's cache for each version of torch, processor and number of threads; costs from other files
are never used. Joules are not kept: they follow from the seconds and the current watts. A damaged file only costs a new
measurement.
"""

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from port_planner.base.cache import cache_folder, read_cached, write_cached
from port_planner.base.processor import cpuinfo, identity

KEPT_DAYS = 30
"""Days after which an operator is measured again, because the machine around it has changed."""
_CLOCK_SKEW_S = 86400.0
"""Seconds by which a measurement may lie in the future: clocks are set back, and a file system's may
differ from the system's.
"""

_FORMAT = 2
MAX_FILES = 32
"""Largest number of files; the oldest are deleted. A file has some 100 KB."""


class KeptCost(msgspec.Struct, frozen=True, array_like=True):
    """The cost of one operator, and when it was measured (seconds since 1970)."""

    seconds: float
    workspace_bytes: int
    measured_at: float


def context(threads: int, cache_bytes: int, *, workspace_seen: bool) -> str:
    """Return everything that costs depend on besides the operator, as the name of a file."""
    fields = [
        _FORMAT, str(torch.__version__), torch.__config__.show(), torch.backends.cpu.get_cpu_capability(), identity(cpuinfo()) or platform.processor(), threads,
        cache_bytes, workspace_seen, *_some_cores(),
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:32]


def _some_cores() -> list[int]:
    """Return the cores on which this process may run, empty for all of them; a single cluster runs
    operators at other speeds.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return usable if len(usable) < (os.cpu_count() or 1) else []


def operator_key(signature: object) -> str:
    """Return the key of an operator with its shapes, layouts, data types and other arguments."""
    return hashlib.sha256(repr(signature).encode()).hexdigest()[:24]


def operators_folder() -> Path | None:
    """Return the folder for costs; None if the user has no home."""
    return cache_folder("operators")


def read_costs(folder: Path | None, name: str, now: float) -> dict[str, KeptCost]:
    """Return the costs stored under a context that are recent enough; empty if they cannot be read."""
    kept = read_cached(folder, name, dict[str, KeptCost]) or {}
    return {key: cost for key, cost in kept.items() if is_young(cost, now)}


def is_young(cost: KeptCost, now: float) -> bool:
    """Return whether a cost is still valid at `now` (seconds since 1970)."""
    return -_CLOCK_SKEW_S <= now - cost.measured_at < KEPT_DAYS * 86400


def keep_costs(folder: Path | None, name: str, fresh: Mapping[str, KeptCost]) -> None:
    """Add costs to those stored under a context, atomically; does nothing if the cache cannot be written."""
    if fresh:
        kept = {**read_costs(folder, name, time.time()), **fresh}
        write_cached(folder, name, kept, max_files=MAX_FILES)
