"""The process that measures and compares operators:
`python -m port_agent.prepare.measurement.measurement_process THREADS`.

It answers each request with `MeasurementProgress` and finally `MeasurementAnswer`. At its first request it has loaded
no more than a worker, so that the memory that it reports is a worker's.
"""

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import msgspec

from port_agent.system.helper_process import requests, send_event
from port_agent.system.torch_loading import load_torch
from port_planner.ir.bundle.codec import unpack_graph

if TYPE_CHECKING:
    from port_planner.profiling.operator_profile import MeasuredCosts


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Profile the graphs in a file and write their costs to another. `resident`: also write what they leave resident.

    `shared`: a file with costs of another machine, or nothing. `elsewhere`: the graphs were recorded on another device.
    `ram_bytes`: limit of the measuring process; 0: no limit.
    """

    source: str
    target: str
    compute_watts: float
    resident: bool
    shared: str = ""
    elsewhere: bool = False
    ram_bytes: int = 0


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """Make the comparisons in a file within a number of bytes of RAM, with a page directory, and write the
    differences to another file.
    """

    source: str
    target: str
    ram_bytes: int
    page_dir: str


Request = Measure | Compare


class MeasurementProgress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """The number of operators measured so far."""

    done: int
    total: int


class MeasurementAnswer(msgspec.Struct, frozen=True, tag_field="event", tag="answer"):
    """The answer is written; the process ends after the last request that it answers."""

    is_last: bool = False


Event = MeasurementProgress | MeasurementAnswer


def main(arguments: list[str]) -> int:
    """Answer requests from the standard input, with `arguments[0]` threads, until it ends."""
    (threads,) = arguments
    load_torch()
    import torch

    torch.set_num_threads(int(threads))
    decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
    for request in requests(decoder):
        is_last = _answer(request)
        send_event(MeasurementAnswer(is_last))
        if is_last:
            break
    return 0


def _answer(request: Request) -> bool:
    """Execute a request; return whether it must be this process's last."""
    if isinstance(request, Measure):
        _measure(request)
        return False
    from port_agent.prepare.measurement.comparing import compare

    return compare(Path(request.source), Path(request.target), request.ram_bytes, Path(request.page_dir))


def _measure(request: Measure) -> None:
    from port_planner.profiling import kept_costs, shared_costs
    from port_planner.profiling.operator_profile import profile_operators

    graphs = [unpack_graph(g) for g in msgpack.unpackb(Path(request.source).read_bytes())]
    shared = shared_costs.unpack_shared(Path(request.shared).read_bytes(), time.time()) if request.shared else {}
    measured = profile_operators(
        graphs,
        compute_watts=request.compute_watts,
        progress=lambda done, total: send_event(MeasurementProgress(done, total)),
        kept_in=kept_costs.operators_folder(),
        shared=shared,
        resident=request.resident,
        elsewhere=request.elsewhere,
        ram_bytes=request.ram_bytes or math.inf,
    )
    Path(request.target).write_bytes(msgspec.msgpack.encode(measured))


def read_measured(path: Path) -> "MeasuredCosts":
    """Return what `Measure` wrote."""
    from port_planner.profiling.operator_profile import MeasuredCosts

    return msgspec.msgpack.decode(path.read_bytes(), type=MeasuredCosts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
