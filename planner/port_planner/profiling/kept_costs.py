"""What operators cost on this machine, kept for the next plan: seconds and workspace by operator and what it takes.

One file in the user's cache for each version of torch, processor and number of threads; costs of another are never
looked at. Joules are not kept: they follow from seconds and the watts of the day. A damaged file costs a measurement.
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
"""After so long an operator is measured again: the machine around it has changed."""
_CLOCK_SKEW_S = 86400.0
"""So far in the future a measurement may lie: clocks are set back, and a file system's differs from the system's."""

_FORMAT = 2
MAX_FILES = 32
"""Those not written for longest go; a file holds some 100 KB."""


class KeptCost(msgspec.Struct, frozen=True, array_like=True):
    """What one operator took, and when that was measured (seconds since 1970)."""

    seconds: float
    workspace_bytes: int
    measured_at: float


def context(threads: int, cache_bytes: int, *, workspace_seen: bool) -> str:
    """Return what costs depend on besides the operator, as the name of a file."""
    fields = [
        _FORMAT, str(torch.__version__), torch.__config__.show(), torch.backends.cpu.get_cpu_capability(), identity(cpuinfo()) or platform.processor(), threads,
        cache_bytes, workspace_seen, *_some_cores(),
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:32]


def _some_cores() -> list[int]:
    """Return the numbers of the cores that this process may run on; none where those are all: on one cluster operators take other times."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return usable if len(usable) < (os.cpu_count() or 1) else []


def operator_key(signature: object) -> str:
    """Return the key of an operator with its shapes, layouts, data types and other arguments."""
    return hashlib.sha256(repr(signature).encode()).hexdigest()[:24]


def operators_folder() -> Path | None:
    """Return where costs are kept; None where the user has no home."""
    return cache_folder("operators")


def read_costs(folder: Path | None, name: str, now: float) -> dict[str, KeptCost]:
    """Return the costs kept under a context that are young enough; none where they cannot be read."""
    kept = read_cached(folder, name, dict[str, KeptCost]) or {}
    return {key: cost for key, cost in kept.items() if is_young(cost, now)}


def is_young(cost: KeptCost, now: float) -> bool:
    """Return whether a cost is as good as measured `now` (seconds since 1970)."""
    return -_CLOCK_SKEW_S <= now - cost.measured_at < KEPT_DAYS * 86400


def keep_costs(folder: Path | None, name: str, fresh: Mapping[str, KeptCost]) -> None:
    """Add costs to those kept under a context, in one piece; a cache that cannot be written keeps none."""
    if fresh:
        kept = {**read_costs(folder, name, time.time()), **fresh}
        write_cached(folder, name, kept, max_files=MAX_FILES)
