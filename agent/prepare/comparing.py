"""Operators in pieces beside whole ones, within the budget that is planned for: `python -m agent.prepare.comparing`.

In a process of its own: kernels must find the bundle's number of threads from the start, and what chains make on made-up data may be
far more than the budget; it is paged as a followed program's tensors are then.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from planner.ir.process_memory import resident_bytes
from planner.slices import comparison


def main(arguments: list[str]) -> int:
    """Compare what file `arguments[0]` asks for, write what differs to `arguments[1]`; then bytes of RAM, and where pages go."""
    source, target, ram_bytes, page_dir = arguments
    request = comparison.Request(Path(source).read_bytes())
    with _room(request.most_held_bytes, int(ram_bytes), Path(page_dir)):
        Path(target).write_bytes(request.answer())
    return 0


def _room(held_bytes: int, ram_bytes: int, page_dir: Path) -> AbstractContextManager[None]:
    """Return what keeps to the budget: nothing, where all that is held at once fits beside the process; following takes several times as long."""
    if resident_bytes() + held_bytes <= ram_bytes:
        return nullcontext()
    from agent.prepare.within_budget import within_budget

    return within_budget(ram_bytes, page_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
