"""Profiling as a process of its own: `python -m agent.prepare.profiling GRAPHS OUT ...`.

So that the memory it reports is that of a bare worker.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import msgspec

from agent.system.torch_loading import load_torch
from planner.ir.bundle.codec import unpack_graph

if TYPE_CHECKING:
    from planner.profiling.operators import Measured

RESIDENT, COSTS_ALONE, ELSEWHERE = "resident", "costs", "elsewhere"
"""What is to be found out, the fifth argument of `main`: what operators leave resident besides what they cost, or not; the last of graphs
that were recorded on another device, of which some operators may be absent here."""


def main(arguments: list[str]) -> int:
    """Profile the graphs in file `arguments[0]`, write the result to `arguments[1]`; costs from elsewhere lie in `arguments[5]`.

    Progress as "done total" lines.
    """
    source, target, threads, watts, resident, *shared = arguments
    load_torch()
    import torch

    from planner.profiling import kept_costs, shared_costs
    from planner.profiling.operators import profile_operators

    torch.set_num_threads(int(threads))
    graphs = [unpack_graph(g) for g in msgpack.unpackb(Path(source).read_bytes())]

    def progress(done: int, total: int) -> None:
        sys.stdout.write(f"{done} {total}\n")
        sys.stdout.flush()

    measured = profile_operators(
        graphs, compute_watts=float(watts), progress=progress, kept_in=kept_costs.cache_folder(),
        shared=shared_costs.unpack_shared(Path(shared[0]).read_bytes(), time.time()) if shared else {},
        resident=resident == RESIDENT, elsewhere=resident == ELSEWHERE,
    )  # fmt: skip
    Path(target).write_bytes(msgspec.msgpack.encode(measured))
    return 0


def read_measured(path: Path) -> "Measured":
    """Return what `main` wrote."""
    from planner.profiling.operators import Measured

    return msgspec.msgpack.decode(path.read_bytes(), type=Measured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
