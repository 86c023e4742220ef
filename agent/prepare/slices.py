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
from planner.ir.graph import StepGraph
from planner.make_bundle import Prepared
from planner.profiling.operators import Measured
from planner.slices.comparison import Differing, pack_request, read_differing
from planner.slices.gradients import split_gradients
from planner.slices.rewriting import Rewritten


@dataclass(frozen=True, slots=True)
class Sliced:
    """A job whose graphs have operators in pieces, what they cost, and what was left whole and why."""

    prepared: Prepared
    measured: Measured
    left_whole: tuple[str, ...]


def in_halves(prepared: Prepared, measured: Measured, threads: int, compute_watts: float, progress: Progress) -> Sliced:
    """Return the job with every convolution's backward pass in halves, `measured` anew where there is any.

    Raises TrialError where a process that compares or measures fails.
    """
    graphs, left = dict(prepared.graphs), list[str]()
    for name, graph in prepared.graphs.items():
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
