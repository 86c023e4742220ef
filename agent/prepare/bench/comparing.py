"""Operators in pieces beside whole ones, within the budget that is planned for.

Kernels must find the bundle's number of threads from the start, and what chains make on made-up data may be far more than the budget;
it is paged as a followed program's tensors are then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.malloc import Allocator, active
from planner.ir.process_memory import resident_bytes
from planner.slices.comparison import ComparisonRequest


def compare(source: Path, target: Path, ram_bytes: int, page_dir: Path) -> bool:
    """Compare what file `source` asks for, write what differs to `target`, and say whether that was followed.

    It is where there is no room for it otherwise: that takes several times as long, and is the last that this process should do.
    """
    request = ComparisonRequest(source.read_bytes())
    room_bytes = ram_bytes - resident_bytes()
    if request.most_held_bytes <= room_bytes:
        with _cached_within(room_bytes):
            target.write_bytes(request.answer())
        return False
    from agent.prepare.within_budget import within_budget

    with within_budget(ram_bytes, page_dir):
        target.write_bytes(request.answer())
    return True


@contextmanager
def _cached_within(room_bytes: int) -> Iterator[None]:
    """Let the allocator, where it is ours, keep no more of what is freed than has room beside what is held."""
    allocator = active()
    if not isinstance(allocator, Allocator):
        yield
        return
    allocator.set_limit(allocator.live_bytes() + room_bytes)
    try:
        yield
    finally:
        allocator.set_limit(None)
