"""Steps with operators in pieces, where this machine's kernels give the bits of the whole.

What is rewritten is first run beside the original in a process of its own, with the bundle's number of threads.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agent.malloc import preload_environment
from agent.prepare.bundle import Progress, TrialError, measure
from agent.system.python_process import module_command, module_environment
from planner import make_bundle
from planner.ir.bundle.bundle import PlannedLimits
from planner.ir.costs import CostTable, DeviceCosts
from planner.ir.devices.kinds import CPU
from planner.ir.graph import GraphError, StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.operand_rules import verify_operands
from planner.make_bundle import Prepared
from planner.profiling.operators import Measured
from planner.slices.chains import find_chains
from planner.slices.comparison import Differing, pack_request, read_differing
from planner.slices.gradients import split_gradients
from planner.slices.pieces import cut_chains
from planner.slices.rewriting import Rewritten


@dataclass(frozen=True, slots=True)
class Sliced:
    """A job whose graphs have operators in pieces, what they cost, and what was left whole and why."""

    prepared: Prepared
    measured: Measured
    left_whole: tuple[str, ...]
    in_pieces: tuple[str, ...] = ()
    """The chains that run in pieces."""


CUTS = ((1 / 3, 4), (1 / 6, 8), (1 / 12, 16))
"""Of the step's own memory: operators that touch more are cut, into so many pieces."""

QUICK_S = 5.0
"""Of planning, for each cut."""


def in_halves(prepared: Prepared, measured: Measured, threads: int, compute_watts: float, progress: Progress) -> Sliced:
    """Return the job with every convolution's backward pass in halves, `measured` anew where there is any.

    Raises TrialError where a process that compares or measures fails.
    """
    graphs, left = dict(prepared.graphs), list[str]()
    for name, graph in prepared.graphs.items():
        if graph.device != CPU:
            continue  # of its kernels nothing is known
        rewritten = split_gradients(graph)
        found = compared(graph, rewritten, threads)
        left += [f"{d.replacement.what}: {d.where}" for d in found]
        graphs[name] = split_gradients(graph, frozenset(i for d in found for i in d.replacement.old)).graph
    if all(graphs[name] == graph for name, graph in prepared.graphs.items()):
        return Sliced(prepared, measured, tuple(left))
    return Sliced(
        replace(prepared, graphs=graphs),
        measured_again(graphs, measured, threads, compute_watts, progress),
        tuple(left),
    )


def in_pieces(
    halved: Sliced, device: DeviceCosts, ram_bytes: int, threads: int, progress: Progress, limits: PlannedLimits
) -> Sliced:
    """Return the job with chains of operators in pieces where a quick plan for `ram_bytes` costs less so, else as it is.

    Each of `CUTS` is compared, measured and planned; the cheapest plan decides. Raises TrialError where a process fails.
    """
    planner = make_bundle.default_planner(strategy="greedy", time_limit_s=QUICK_S, limits=limits)
    least = _quick_joules(halved, device, ram_bytes, planner)
    if least is not None and least.keeps_everything:
        return halved
    best = halved
    for share, pieces in CUTS:
        tried = _cut(halved, int(share * (ram_bytes - device.base_bytes)), pieces, threads, device, progress)
        found = None if tried is None else _quick_joules(tried, device, ram_bytes, planner)
        if tried is not None and found is not None and (least is None or found.joules < least.joules):
            best, least = tried, found
    return best


@dataclass(frozen=True, slots=True)
class _Quick:
    """What a quick plan costs in all, wear included, and whether it moves nothing."""

    joules: float
    keeps_everything: bool


def _quick_joules(sliced: Sliced, device: DeviceCosts, ram_bytes: int, planner: make_bundle.Planner) -> _Quick | None:
    """Return what a quick plan of the main graph costs; None where none fits."""
    graph = next(iter(sliced.prepared.graphs.values()))
    costs = CostTable(device, sliced.measured.ops[0])
    found = planner(graph, costs, ram_bytes).plan
    if found is None:
        return None
    return _Quick(lower(graph, costs, found).cost_joules, not found.decisions and not found.sliced)


def _cut(
    halved: Sliced, fat_bytes: int, pieces: int, threads: int, device: DeviceCosts, progress: Progress
) -> Sliced | None:
    """Return the job with the chains of operators that touch more than `fat_bytes` in pieces; None where there are none."""
    graphs, left = dict(halved.prepared.graphs), list(halved.left_whole)
    cut: list[str] = []
    for name, graph in halved.prepared.graphs.items():
        if graph.device != CPU:
            continue
        chains = find_chains(graph, fat_bytes)
        rewritten = cut_chains(graph, chains, pieces)
        found = compared(graph, rewritten, threads)
        left += [f"{d.replacement.what}: {d.where}" for d in found]
        odd = {i for d in found for i in d.replacement.old}
        if odd:
            chains = [c for c in chains if odd.isdisjoint(c.ops)]
            rewritten = cut_chains(graph, chains, pieces)
        try:
            verify_operands(rewritten.graph)
        except GraphError as error:  # pieces of what only a whole operator is known to have checked
            left.append(str(error).partition(";")[0])
            continue
        graphs[name] = rewritten.graph
        cut += [r.what for r in rewritten.replacements]
    if not cut:
        return None
    measured = measured_again(graphs, halved.measured, threads, device.compute_watts, progress)
    return Sliced(replace(halved.prepared, graphs=graphs), measured, tuple(left), tuple(cut))


def measured_again(
    graphs: Mapping[str, StepGraph], before: Measured, threads: int, compute_watts: float, progress: Progress
) -> Measured:
    """Return the costs of rewritten graphs; what the process itself holds was measured `before`."""
    fresh = measure(graphs, threads, compute_watts, progress)
    return replace(before, ops=fresh.ops, retained_bytes=max(before.retained_bytes, fresh.retained_bytes))


def compared(graph: StepGraph, rewritten: Rewritten, threads: int) -> tuple[Differing, ...]:
    """Return which replacements do not give the original's bits with so many threads on this machine.

    Raises TrialError where the process that finds out fails.
    """
    if not rewritten.replacements:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "graphs", Path(folder) / "differing"
        source.write_bytes(pack_request(graph, rewritten, threads))
        environment = {**module_environment(), **preload_environment(None), "OMP_NUM_THREADS": str(threads)}
        command = [*module_command("planner.slices.comparison"), str(source), str(target)]
        ended = subprocess.run(command, env=environment, check=False)
        if ended.returncode:
            raise TrialError(
                f"comparing operators in pieces ended with exit code {ended.returncode}; see the message above"
            )
        return read_differing(target)
