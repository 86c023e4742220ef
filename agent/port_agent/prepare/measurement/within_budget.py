"""Keep the planning process within the budget for which it plans, because a model that never
fitted here is planned here.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from port_agent.intercept.budget import budget
from port_agent.intercept.dispatch import deferred_modules, light_dynamo
from port_agent.intercept.dispatch.operator_memory import MemoryShortage
from port_agent.intercept.residency.memory import BudgetTooSmallError
from port_agent.malloc import active, release_free_memory
from port_planner.base.process_memory import resident_bytes
from port_planner.base.units import format_bytes
from port_planner.ir.traced import SEARCH_BYTES

_MIN_TENSOR_BYTES = 32 << 20
"""Least bytes for tensors if this process alone fills the budget: it loads code that the
training worker does not need.
"""

_SEARCH_CACHE_BYTES = 16 << 20
"""Bytes of freed blocks that a search keeps for reuse, because its objects grow beside them.

The next tensor sets another limit.
"""


@contextmanager
def within_budget(ram_bytes: int, page_dir: Path) -> Iterator[Callable[[], None]]:
    """Run the block within `ram_bytes` of resident memory; its tensors must not be used afterwards.

    It yields a function that makes space for a search, which is not intercepted: free memory goes back to the system,
    and tensors to pages until they are used again, if `SEARCH_BYTES` would not fit alongside them. Objects that Python
    holds by then are excluded from garbage collection until the block ends, because libraries and recordings stay, and
    each collection during a search would visit them all. The function raises PageError.

    Operators that take more than the budget leaves are not reported one by one, because that says nothing about the
    plan. If the process exceeded the budget, that is reported at the end. Raises UnsupportedError if something in the
    block cannot be intercepted, or is intercepted already, and PageError if `page_dir` cannot take pages.
    """
    light_dynamo.hold_place()
    deferred_modules.defer_modules()
    allocator, limit = active(), budget(ram=ram_bytes, page_dir=page_dir).resizing()
    try:
        limit.start()
    except BudgetTooSmallError:
        limit = budget(tensors=_MIN_TENSOR_BYTES, page_dir=page_dir).resizing().start()
    lacks: list[MemoryShortage] = []
    limit.interceptor.op_memory.on_shortage = lacks.append

    def make_free() -> None:
        gc.collect()
        gc.freeze()
        release_free_memory()
        if resident_bytes() + SEARCH_BYTES > ram_bytes:
            limit.interceptor.give_back()
        if allocator is not None:
            allocator.set_limit(allocator.live_bytes() + _SEARCH_CACHE_BYTES)

    try:
        yield make_free
    finally:
        gc.unfreeze()
        limit.stop(restore=False)
        if lacks and limit.report.peak_resident_bytes > ram_bytes:
            _report(max(lacks, key=lambda s: s.needed_bytes), limit.report.peak_resident_bytes)


def _report(largest: MemoryShortage, peak_bytes: int) -> None:
    """Report on standard error that this process exceeded the budget, and the operator that it ran whole and the plan
    may tile.
    """
    sys.stderr.write(
        f"port-agent: planning took {format_bytes(peak_bytes)}, which is more than the budget of "
        f"{format_bytes(largest.ram_bytes)}: a step is recorded and compared with its operators whole, and "
        f"{largest}. The bundle itself may take less\n"
    )
