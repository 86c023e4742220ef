"""Compare tiled operators with whole ones, within the planned budget.

Kernels must see the bundle's number of threads from the start. The results that chains compute from random data may
exceed the budget by far, so they are paged like the tensors of any program under a budget.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from port_agent.malloc import Allocator, active
from port_planner.base.process_memory import resident_bytes
from port_planner.exactness.request import ComparisonRequest, pack_differing


def compare(source: Path, target: Path, ram_bytes: int, page_dir: Path) -> bool:
    """Make the comparisons in file `source`, write the differences to `target`, and return whether any was intercepted.

    Interception is used for comparisons that do not fit otherwise. It takes several times as long, and must be
    this process's last work.
    """
    request = ComparisonRequest(source.read_bytes())
    free_bytes = ram_bytes - resident_bytes()
    fitting, others = request.parted(free_bytes)
    with _cached_within(free_bytes):
        found = request.differing(fitting)
    followed = any(rewritten.replacements for _, rewritten in others)
    if followed:
        from port_agent.prepare.measurement.within_budget import within_budget

        with within_budget(ram_bytes, page_dir):
            found = [plain + more for plain, more in zip(found, request.differing(others), strict=True)]
    target.write_bytes(pack_differing(found))
    return followed


@contextmanager
def _cached_within(free_bytes: int) -> Iterator[None]:
    """Let our allocator, if it is loaded, keep only as much freed memory as fits beside the memory in use."""
    allocator = active()
    if not isinstance(allocator, Allocator):
        yield
        return
    allocator.set_limit(allocator.live_bytes() + free_bytes)
    try:
        yield
    finally:
        allocator.set_limit(None)
