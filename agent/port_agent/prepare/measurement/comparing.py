"""Operators in pieces beside whole ones, within the budget that is planned for.

Kernels must find the bundle's number of threads from the start, and what chains make on made-up data may be far more than the budget;
it is paged as a followed program's tensors are then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from port_agent.malloc import Allocator, active
from port_planner.base.process_memory import resident_bytes
from port_planner.exactness.request import ComparisonRequest, pack_differing


def compare(source: Path, target: Path, ram_bytes: int, page_dir: Path) -> bool:
    """Compare what file `source` asks for, write what differs to `target`, and say whether any of it was followed.

    That is what has no room otherwise: it takes several times as long, and is the last that this process should do.
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
    """Let the allocator, where it is ours, keep no more of what is freed than has room beside what is held."""
    allocator = active()
    if not isinstance(allocator, Allocator):
        yield
        return
    allocator.set_limit(allocator.live_bytes() + free_bytes)
    try:
        yield
    finally:
        allocator.set_limit(None)
