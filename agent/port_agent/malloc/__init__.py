"""Memory of a training process under a RAM budget: thrifty at the peak, cheap in between.

The allocator and its substitutes (figures: `benchmarks/malloc.py`):

- `preload_environment(limit)` for a process that starts later (the worker) preloads the allocator. Freed blocks are
  reused without page faults as long as live + cached memory stays below the limit; statistics, trim on demand and a
  hard limit through `Allocator`. Needs glibc and the object built at installation.
- The same call, if that object is missing or does not load (`preload_trouble` says why), makes glibc map blocks of
  64 KiB and more one by one. The peak is as small, but every page of every block costs a page fault.
- `begin_again_preloaded(limit)` for a command that has done nothing yet (`plan`) starts it again
  with the preloaded allocator.
- `thrifty_glibc()` for a process that already runs (`agent.budget` in a notebook) has the effect of
  the second, from then on.
- The same call on macOS makes its malloc keep no large blocks (an undocumented switch that others measured;
  nobody has run this code on a Mac). C libraries other than glibc are used as they are.
- `release_free_memory()` returns all free memory to the system, anywhere and at any time.
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
