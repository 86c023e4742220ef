"""The number of threads for a bundle's operators: the one that is fastest on this machine.

The bits of a result depend on the number of threads, among which sums are split, so it is fixed when the
bundle is made. Threads are not bound to cores: if cores differ, the kernel runs as many busy threads on the
fast cores as there are such cores.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.measurement.progress import Progress, part_of
from port_agent.prepare.peers import PlanPeers
from port_planner.ir.graph import StepGraph
from port_planner.profiling.operator_profile import MeasuredCosts

_WORTH_A_THREAD = 0.97
"""Share by which a further thread must shorten the step, which exceeds measurement noise; a core left
free runs the page thread.
"""


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The chosen number of threads, its measurements, and seconds of a step's operators by
    the numbers that were tried.
    """

    threads: int
    measured: MeasuredCosts
    step_s: Mapping[int, float]


@contextlib.contextmanager
def counts_set() -> Iterator[list[int]]:
    """Collect the numbers of torch's threads that the program sets in the block, in order,
    beginning with the initial one.
    """
    counts, set_count = list[int](), torch.set_num_threads

    def setting(nthreads: int) -> None:
        set_count(nthreads)
        counts.append(nthreads)

    torch.set_num_threads = setting
    try:
        yield counts
    finally:
        torch.set_num_threads = set_count


def thread_choices(cores: int, clusters: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the numbers of threads that are measured, ascending: halves of all cores, one core less, and all.

    `clusters`: number of cores of each kind, the fastest first. The fastest alone, the fastest with the next, and so on
    are also measured, because an operator waits for its slowest thread.
    """
    halves = {cores >> shift for shift in range(cores.bit_length())}
    return tuple(sorted(halves | {max(1, cores - 1)} | {count for count in accumulate(clusters) if count <= cores}))


def fastest(
    graphs: Mapping[str, StepGraph],
    counts: tuple[int, ...],
    watts: Callable[[int], float],
    progress: Progress,
    peers: PlanPeers | None = None,
    measurer: MeasurementWorker | None = None,
) -> ThreadChoice:
    """Profile the operators with each of `counts` threads and choose the one with the shortest main step.

    `measurer`: the worker that measures them. `watts`: power of the machine when it computes with a given number of
    threads. If two numbers are equally fast, the smaller is chosen. `peers` may know the costs of operators. Raises
    DryRunError if profiling fails.
    """
    measurer, found = measurer or MeasurementWorker(), dict[int, MeasuredCosts]()
    for done, count in enumerate(counts):
        shared = peers.costs(count) if peers is not None else b""
        found[count] = measurer.measure(
            graphs.values(), count, watts(count), part_of(progress, done, len(counts)), shared
        )
        if peers is not None:
            peers.judge_costs(count, found[count])
    step_s = {count: sum(op.seconds for op in measured.ops[0]) for count, measured in found.items()}
    chosen = counts[0]
    for count in counts[1:]:
        if step_s[count] < step_s[chosen] * _WORTH_A_THREAD:
            chosen = count
    return ThreadChoice(chosen, found[chosen], step_s)
