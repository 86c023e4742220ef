"""Guarded memory: tensors keep their addresses, and the protection of their pages says what is resident.

The C part is preloaded with the allocator (`port_agent.malloc`): memory that torch's CPU allocator asks for is dirty, clean or
away, and whoever touches what is away, operator or not, faults and finds it there. `guard.h` is the interface and its terms.
`arena.c`: addresses; `frames.c`: pages that move from block to block; `store.c`: the page file; `guard.c`: who stays and who
leaves; `faults.c`: the handler, and the program's own; `kernel_calls.c`: buffers handed to the kernel. `processes.c`: those that
share a budget, `program_starts.c`: how they come to it, `service.c`: the thread that measures while nothing else does; `probe.c`: a
trial.
"""

from port_agent.guard.memory import (
    GuardCounters,
    GuardedMemory,
    MappingKind,
    active_guard,
    guard_environment,
    smallest_block_bytes,
)
from port_agent.guard.probe import GuardProbe, probe_guard
from port_agent.guard.processes import ProcessTable, ProcessUse

__all__ = [
    "GuardCounters", "GuardProbe", "GuardedMemory", "MappingKind", "ProcessTable", "ProcessUse", "active_guard", "guard_environment", "probe_guard",
    "smallest_block_bytes",
]  # fmt: skip
