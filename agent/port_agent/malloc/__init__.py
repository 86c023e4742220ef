"""Memory of a training process under a RAM budget: thrifty at the peak, cheap in between.

What each way to load it gives (figures: `benchmarks/malloc.py`):

- `preload_environment(limit)` for a process still to be started (the worker): the preloaded allocator. Freed blocks are
  reused without page faults as long as live + cached memory stays below the limit; statistics, trim on demand and a
  hard limit through `Allocator`. Needs glibc and the object built at installation.
- the same call where that object is missing or does not load (`preload_trouble` says why): glibc told to map blocks of
  64 KiB and more one by one. The same small peak, at the price of a page fault for every page of every block.
- `begin_again_preloaded(limit)` for a command that has done nothing yet (`plan`): it becomes itself with the first.
- `thrifty_glibc()` for a process that already runs (`agent.budget` in a notebook): the same as the second, from then on.
- the same call on macOS: its malloc told to keep no large blocks (an undocumented switch that others measured;
  nobody has run this code on a Mac). C libraries other than glibc are used as they are.
- `release_free_memory()` anywhere, at any time: what is free right now goes back to the system.
"""

from port_agent.malloc.allocator import Allocator, AllocatorStats, active, release_free_memory, thrifty_glibc
from port_agent.malloc.environment import (
    PreloadMode,
    preload_environment,
    preload_mode,
    preload_path,
    preload_trouble,
)
from port_agent.malloc.restart import begin_again_preloaded

__all__ = [
    "Allocator",
    "AllocatorStats",
    "PreloadMode",
    "active",
    "begin_again_preloaded",
    "preload_environment",
    "preload_mode",
    "preload_path",
    "preload_trouble",
    "release_free_memory",
    "thrifty_glibc",
]
