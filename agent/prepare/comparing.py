"""Operators in pieces beside whole ones, within the budget that is planned for: `python -m agent.prepare.comparing`.

In a process of its own: kernels must find the bundle's number of threads from the start, and what chains make on made-up data may be
far more than the budget; it is paged as a followed program's tensors are.
"""

import sys
from pathlib import Path

from agent.prepare.within_budget import within_budget
from planner.slices import comparison


def main(arguments: list[str]) -> int:
    """Compare what file `arguments[0]` asks for, write what differs to `arguments[1]`; then bytes of RAM, and where pages go."""
    source, target, ram_bytes, page_dir = arguments
    with within_budget(int(ram_bytes), Path(page_dir)):
        return comparison.main([source, target])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
