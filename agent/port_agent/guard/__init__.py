"""Guarded memory: tensors keep their addresses, and page protection decides what is resident.

The C part is preloaded with the allocator (`port_agent.malloc`). Memory that torch's CPU allocator requests is
dirty, clean or paged out. Any code that touches a paged-out block faults, and finds its contents there. `guard.h`
is the interface and defines its terms. `arena.c`: addresses; `frames.c`: pages that move from block to block;
`store.c`: the page file; `guard.c`: which blocks stay and which are evicted; `faults.c`: the fault handler, and the
program's own; `kernel_calls.c`: buffers handed to the kernel. `processes.c`: processes that share a budget,
`program_starts.c`: how they join it, `take_over.c`: how a process that already runs begins, `service.c`: the thread
that measures; `probe.c`: a self-test.
"""

from port_agent.guard.guard_probe import GuardProbe, probe_guard
from port_agent.guard.memory import (
    GuardCounters,
    GuardedMemory,
    GuardError,
    MappingKind,
    active_guard,
    begin_guard,
    end_guard,
    guard_environment,
    smallest_block_bytes,
)
from port_agent.guard.processes import ProcessTable, ProcessUse

__all__ = [
    "GuardCounters", "GuardError", "GuardProbe", "GuardedMemory", "MappingKind", "ProcessTable", "ProcessUse", "active_guard", "begin_guard", "end_guard", "guard_environment", "probe_guard",
    "smallest_block_bytes",
]  # fmt: skip
