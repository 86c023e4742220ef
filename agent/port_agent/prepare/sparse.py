"""Train fewer parameters so that a step fits: those that gain most within the budget (`plan --sparse-update`)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.measurement.progress import Progress
from port_planner.base.units import format_bytes, format_joules, format_seconds
from port_planner.ir.costs import CostTable, DeviceCosts
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import TrainingJob
from port_planner.make_bundle import CapturedJob, InfeasibleError
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.sparse.bytes import TrainedBytes, trained_parameters
from port_planner.sparse.choose import Contributions, Layer, TrainableChoice, analyse, choose_trainable, layers_of
from port_planner.sparse.probe import ProbeResult, TrainingProbe, job_probe

Prepare = Callable[[], CapturedJob]
"""Function that captures the job with its model in its current state, without frozen parameters."""

_HEADROOM_SHARE = 0.02
"""Share of the budget that is kept free for the unplanned memory that a dry run finds."""
_TRIES = 5


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step on resident memory, time and energy; None: no limit."""

    ram_bytes: int
    seconds: float | None = None
    joules: float | None = None

    def allow(self, needed: TrainedBytes, trained: frozenset[str]) -> bool:
        """Return whether a step that updates `trained` keeps these limits."""
        in_time = self.seconds is None or needed.step_seconds(trained) <= self.seconds
        return in_time and (self.joules is None or needed.step_joules(trained) <= self.joules)

    def __str__(self) -> str:
        parts = (
            [] if self.seconds is None else [f"in {format_seconds(self.seconds)} per step, which the deadline allows"]
        )
        if self.joules is not None:
            parts.append(f"with {format_joules(self.joules)} per step, which --step-joules allows")
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class SparseJob:
    """A job that trains only the chosen parameters, captured, and the basis of the choice.

    `needed_bytes`: resident bytes of the captured step when it keeps everything, the process itself included;
    `full_bytes`: the same with every parameter trained. `predicted` is the loss that the additive analysis expects.
    """

    captured: CapturedJob
    measured: MeasuredCosts
    trained: frozenset[str]
    contributions: Contributions
    needed_bytes: int
    full_bytes: int
    predicted_loss: float
    before: ProbeResult
    reached: ProbeResult
    everything: ProbeResult
    proven: bool

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers, in the order of the forward pass."""
        return self.contributions.layers


def train_less(
    full: CapturedJob,
    measured: MeasuredCosts,
    device: DeviceCosts,
    limits: StepLimits,
    *,
    prepare: Prepare,
    threads: int,
    steps: int,
    progress: Progress,
) -> SparseJob:
    """Freeze parameters that are not worth their memory and capture the job again.

    The contribution of each layer is measured by training it for `steps` batches with plain PyTorch. The chosen set
    is the best one whose step keeps everything resident, without paging or recomputation. Its size, estimated from
    the full capture, is verified by capturing the set itself. No step takes more than `limits`. Raises
    InfeasibleError if nothing fits.
    """
    job, costs = full.job, _tables(full, measured, device)
    needed = TrainedBytes(full.graphs, costs)
    names = trained_parameters(full.graphs[next(iter(full.graphs))])
    probe, layers = job_probe(job, steps), layers_of(names)
    table = analyse(layers, _counted(probe, layers, progress))
    everything = frozenset(names)
    probe(everything)
    budget = limit = int(limits.ram_bytes * (1 - _HEADROOM_SHARE))
    for _ in range(_TRIES):
        found = _chosen(table, needed, limit, probe, limits)
        _freeze(job, found.parameters)
        captured = prepare()
        fresh = MeasurementWorker().measure(
            captured.graphs.values(), threads, device.compute_watts, lambda stage, share: None
        )
        real = _kept_bytes(captured, _tables(captured, fresh, device))
        if real <= budget:
            return SparseJob(
                captured,
                fresh,
                found.parameters,
                table,
                real,
                needed(everything),
                -found.predicted,
                probe.results[frozenset()],
                probe.results[found.parameters],
                probe.results[everything],
                found.proven,
            )
        _freeze(job, everything)
        limit = min(found.needed_bytes - 1, found.needed_bytes * budget // real)
    raise InfeasibleError(
        f"the chosen parameters need {format_bytes(real)} when captured by themselves, more than the "
        f"{format_bytes(budget)} of the budget",
        math.ceil(real / (1 - _HEADROOM_SHARE)),
    )


def _chosen(
    table: Contributions, needed: TrainedBytes, limit: int, probe: TrainingProbe, limits: StepLimits
) -> TrainableChoice:
    found = choose_trainable(table, needed, limit, probe, allowed=partial(limits.allow, needed))
    if found is not None and found.parameters:
        return found
    cheapest = min(
        needed(frozenset(names)) for layer in table.layers for names in (layer.biases, layer.weights) if names
    )
    if cheapest > limit:
        least = int(
            cheapest * limits.ram_bytes * (1 - _HEADROOM_SHARE) / limit
        )  # by how much the last capture exceeded its count
        raise InfeasibleError(
            f"training the cheapest layer alone needs {format_bytes(least)}, but --ram is "
            f"{format_bytes(limits.ram_bytes)}",
            math.ceil(least / (1 - _HEADROOM_SHARE)),
            remedy="use a smaller batch, or leave out --sparse-update to page",
        )
    if limits.seconds is not None or limits.joules is not None:
        nothing: frozenset[str] = frozenset()
        raise InfeasibleError(
            f"no layer that gains anything can be trained {limits} (the forward pass alone takes "
            f"{format_seconds(needed.step_seconds(nothing))} and {format_joules(needed.step_joules(nothing))}); move "
            "the deadline, train fewer epochs, or raise --step-joules",
            None,
        )
    raise InfeasibleError(
        "no layer lowered the loss in its short training; give more --probe-steps, or another learning rate", None
    )


def _counted(probe: TrainingProbe, layers: tuple[Layer, ...], progress: Progress) -> Callable[[frozenset[str]], float]:
    """Return the probe, which then also reports the progress of the analysis."""
    total = 1 + sum(bool(layer.biases) + bool(layer.weights) for layer in layers)

    def measure(names: frozenset[str]) -> float:
        score = probe(names)
        progress("analyse", len(probe.results) / total)
        return score

    return measure


def _freeze(job: TrainingJob, trained: frozenset[str]) -> None:
    """Make only `trained` of the optimizer's parameters require gradients."""
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    for group in job.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in names:
                parameter.requires_grad_(names[parameter] in trained)


def _tables(captured: CapturedJob, measured: MeasuredCosts, device: DeviceCosts) -> dict[str, CostTable]:
    return {name: CostTable(device, ops) for name, ops in zip(captured.graphs, measured.ops, strict=True)}


def _kept_bytes(captured: CapturedJob, costs: Mapping[str, CostTable]) -> int:
    """Return the planner's own peak of every graph when nothing is paged or computed twice."""
    return max(
        lower(graph, costs[name], Plan(), check_budget=False).peak_bytes for name, graph in captured.graphs.items()
    )
