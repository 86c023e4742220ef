"""Operators in pieces beside whole ones, within the budget that is planned for.

Kernels must find the bundle's number of threads from the start, and what chains make on made-up data may be far more than the budget;
it is paged as a followed program's tensors are then.
"""

from contextlib import nullcontext
from pathlib import Path

from planner.ir.process_memory import resident_bytes
from planner.slices.comparison import ComparisonRequest


def compare(source: Path, target: Path, ram_bytes: int, page_dir: Path) -> bool:
    """Compare what file `source` asks for, write what differs to `target`, and say whether that was followed.

    It is where there is no room for it otherwise: that takes several times as long, and is the last that this process should do.
    """
    request = ComparisonRequest(source.read_bytes())
    followed = resident_bytes() + request.most_held_bytes > ram_bytes
    if followed:
        from agent.prepare.within_budget import within_budget

        room = within_budget(ram_bytes, page_dir)
    with room if followed else nullcontext():
        target.write_bytes(request.answer())
    return followed
