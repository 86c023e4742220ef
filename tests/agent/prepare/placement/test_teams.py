"""Operators go to the team of threads that the tables say takes least energy, and the bundle trains
with their numbers each time.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from port_agent.prepare.placement.divide import PlacementError
from port_agent.prepare.placement.reference import with_placed_reference
from port_agent.prepare.placement.teams import TeamPlacement, TeamTimes, measured_times, on_cores_of, team_placement
from port_agent.prepare.reference import with_expected_results
from port_agent.training.comparison import MismatchError
from port_agent.training.trainer import Trainer
from port_planner import make_bundle
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import TEAMS_FORMAT, BundleError
from port_planner.ir.costs import DeviceCosts, Flash, OpCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.cpu_teams import CpuTeam
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import TrainingJob
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts
from tests.agent.training.options import train_options

pytestmark = pytest.mark.own_process

TEAMS = (CpuTeam(2),)
WATTS = (1.0, 1.5)
FREE = TeamTimes((0.0, 0.0), ((0.0, 0.0), (0.0, 0.0)))
SUMMED = ("mm", "addmm", "sum")


class Shift(nn.Module):
    """Adds one number, whose gradient is the sum of all elements of its output's: two threads add those in another
    order than one on every processor, which products and sums over rows do only on some. It begins at zero, so that the
    update keeps the gradient's last bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum()


@pytest.fixture(scope="module")
def captured() -> CapturedJob:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), Shift(), nn.Tanh(), Shift(), nn.Linear(64, 32), Shift())
    job = TrainingJob(model, loss, torch.optim.SGD(model.parameters(), lr=1e-6), [torch.randn(10000, 8)], 4096)
    return with_expected_results(make_bundle.prepare(job, followed=2), 2)


def tables(captured: CapturedJob) -> tuple[MeasuredCosts, MeasuredCosts]:
    """Return what operators take with one thread and with two: sums and products a third of the time with two,
    all else a little longer.
    """
    found = []
    for watts, share, other in zip(WATTS, (1.0, 1 / 3), (1.0, 1.1), strict=True):
        rows = []
        for graph in captured.graphs.values():
            names = [op.name.removeprefix("aten::").partition(".")[0] for op in graph.ops]
            seconds = [1e-3 * (share if name in SUMMED else other) for name in names]
            rows.append(tuple(OpCost(s, 0, s * watts) for s in seconds))
        found.append(MeasuredCosts(tuple(rows), 0, 0))
    return found[0], found[1]


def divide(captured: CapturedJob, times: TeamTimes = FREE) -> TeamPlacement:
    return team_placement(captured, tables(captured), 1, TEAMS, times, WATTS, 0.1, time_limit_s=10.0)


def test_each_operator_has_the_team_that_takes_least_and_a_switch_is_counted(captured: CapturedJob) -> None:
    found = divide(captured)
    graph = found.captured.graphs["step"]
    summed = [op.name.removeprefix("aten::").partition(".")[0] in SUMMED for op in graph.ops]
    assert [op.team for op in graph.ops] == [int(one) for one in summed] and any(summed)
    assert found.choice.seconds < min(found.alone.values()) and set(found.alone) == {"1 thread", "2 threads"}
    on_two = sum(cost.joules for cost in tables(captured)[1].ops[0]) + 0.1 * found.alone["2 threads"]
    assert found.choice.joules < on_two, "what gains nothing of a second thread draws less with one"
    slow = TeamTimes((0.0, 1e-6), ((0.0, 2e-6), (2e-6, 0.0)))  # little enough to change no choice
    with_switches = divide(captured, slow)
    switches = sum(a != b for a, b in zip(summed, summed[1:] + summed[:1], strict=True))
    more = with_switches.choice.seconds - found.choice.seconds
    assert more == pytest.approx(2e-6 * switches + 1e-6 * sum(summed))
    assert sum(c.seconds for c in with_switches.measured.ops[0]) == pytest.approx(with_switches.choice.seconds)


def test_where_a_switch_takes_more_than_it_saves_that_is_said(captured: CapturedJob) -> None:
    expensive = TeamTimes((0.0, 0.0), ((0.0, 1.0), (1.0, 0.0)))
    with pytest.raises(PlacementError, match=r"from one to another 1e\+06 microseconds; leave out --place"):
        divide(captured, expensive)


def test_what_teams_take_beside_operators_is_measured() -> None:
    times = measured_times(1, (CpuTeam(2), CpuTeam(1, (sorted(os.sched_getaffinity(0))[0],))))
    assert times.entry_s[0] == 0 < times.entry_s[1] < 1e-3 and 0 < times.entry_s[2] < 0.1
    assert all(0 <= seconds < 0.1 for row in times.switch_s for seconds in row)


def test_operators_are_measured_on_the_cores_of_their_team() -> None:
    before = os.sched_getaffinity(0)
    with on_cores_of(CpuTeam(1, (min(before),))):
        assert os.sched_getaffinity(0) == {min(before)}
    with on_cores_of(CpuTeam(1)):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def bundle_of(found: TeamPlacement, captured: CapturedJob, path: Path) -> Bundle:
    kinds = {name: (CPU,) * len(graph.ops) for name, graph in captured.graphs.items()}
    made = with_placed_reference(found.captured, captured.graphs, kinds, CPU)
    device = DeviceCosts("test", 0, 1.0, 1.0, Flash("card", 1e8, 5e7, 1e-4, 1e-9, 1e-9))
    costs = dict(zip(made.graphs, found.measured.tables(device), strict=True))
    plans = {n: replace(Plan(), peak_bytes=lower(g, costs[n], Plan()).peak_bytes) for n, g in made.graphs.items()}
    make_bundle.write(path, made, [plans], costs, [1 << 30], threads=1)
    return Bundle(path)


def trained(bundle: Bundle, folder: Path) -> list[float]:
    trainer = Trainer(bundle, train_options(folder, folder, epochs=1, verify=2))
    losses: list[float] = []

    def note(event: Any) -> None:
        losses.append(event.loss)

    try:
        trainer.start()
        trainer.train(note, lambda commit, seconds: None)
        return losses
    finally:
        trainer.close()


def test_the_bundle_trains_with_the_numbers_of_its_operators_each_time(captured: CapturedJob, tmp_path: Path) -> None:
    bundle = bundle_of(divide(captured), captured, tmp_path / "teams.port")
    assert (bundle.manifest.format, bundle.manifest.teams, bundle.manifest.threads) == (TEAMS_FORMAT, TEAMS, 1)
    assert bundle.manifest.reference.placed and bundle.manifest.reference.checksums != captured.reference.checksums
    assert trained(bundle, tmp_path / "first") == trained(bundle, tmp_path / "second")


def test_operators_that_run_with_another_number_of_threads_end_the_training(
    captured: CapturedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(divide(captured), captured, tmp_path / "teams.port")
    monkeypatch.setattr("port_agent.training.executor.Executor._in_team", lambda self, index, run: run)
    with pytest.raises(MismatchError):
        trained(bundle, tmp_path / "state")


def test_a_bundle_whose_operators_are_for_a_team_that_it_does_not_name_is_refused(
    captured: CapturedJob, tmp_path: Path
) -> None:
    found = divide(captured)
    with pytest.raises(BundleError, match="a thread team that the manifest does not list"):
        bundle_of(replace(found, captured=replace(found.captured, teams=())), captured, tmp_path / "wrong.port")
