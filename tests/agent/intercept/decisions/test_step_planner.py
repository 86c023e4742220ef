"""A plan found beside the program: adopted between segments, kept for the next run, never seen in the numbers."""

import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from port_agent import budget
from port_agent.energy.sources.power_models import power_with
from port_agent.intercept.budget import _Running
from port_agent.intercept.decisions import kept_plans
from port_agent.intercept.decisions.step_planner import LONGEST_STEP, StepPlanner, StepTraffic, repeated
from port_agent.intercept.residency.trace import SegmentPlan, Trace

LIMIT = "500K"
TURNS = 10
ANYTHING_IS_BETTER, NOTHING_IS_BETTER = StepTraffic(math.inf, 0), StepTraffic(0.0, 0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep plans below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("port_agent.intercept.decisions.step_planner._SEARCH_S", 0.3)
    return tmp_path / "cache" / "port-agent" / "plans"


class Training:
    """A small network whose weights, gradients and states do not fit the limit together."""

    def __init__(self, layers: int = 3) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(144, 144) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> float:
        """Train for one step; return the loss."""
        loss = self.model(torch.randn(4, 144)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def accumulate(self, *backwards: int) -> None:
        """Make a step for each number, after this number of backward passes."""
        for count in backwards:
            for _ in range(count):
                self.model(torch.ones(4, 144)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def planner() -> StepPlanner:
    """Return the planning of the budget that is active."""
    running = _Running._of_this_process
    assert running is not None
    return running.interceptor.planner


def steps_until_planned(training: Training) -> Iterator[float]:
    """Train until the search is over and its plan decides, with patience for a busy machine."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        yield training.step()
        search, adopted = planner()._search, planner().adopted
        if search is not None:
            search.before = ANYTHING_IS_BETTER  # so small a step is decided well without a plan
            search.process.wait(timeout=120)
        elif adopted is not None:
            adopted.before = ANYTHING_IS_BETTER  # recomputing takes longer on a busy machine
            return
    raise AssertionError("no plan was adopted")


@pytest.mark.process
def test_the_step_is_planned_and_the_plan_is_kept_for_the_next_run(tmp_path: Path, cache: Path) -> None:
    losses: list[list[float]] = []
    counts = []
    for _ in range(2):
        training = Training()
        with budget(tensors=LIMIT, page_dir=tmp_path).resizing() as active:
            found = list(steps_until_planned(training))
            counts.append(len(found))
            found += [training.step() for _ in range(3)]
            report = active.report
        assert report.plan in ("greedy", "milp")
        assert report.predicted_step_seconds is not None and report.step_seconds is not None
        assert report.planned_after_seconds is not None and report.planned_after_seconds > 0
        losses.append(found)
    shorter = min(map(len, losses))
    assert losses[0][:shorter] == losses[1][:shorter]
    plain = Training()
    assert losses[0] == [plain.step() for _ in losses[0]]
    assert counts[1] == 2 < counts[0]  # neither recorded nor searched again; the first step makes the optimizer's state
    assert len(list(cache.iterdir())) == 1


@pytest.mark.process
def test_a_plan_is_searched_when_a_step_came_twice(tmp_path: Path) -> None:
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        for _ in range(2):
            training.step()
            assert planner()._search is None
        training.step()
        assert planner()._search is not None


@pytest.mark.slow
def test_backward_without_steps_is_recorded_no_longer_than_a_step_may_be(tmp_path: Path) -> None:
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        training.accumulate(1, 3, 2)
        longest = 0
        for _ in range(2 * LONGEST_STEP):
            training.model(torch.ones(4, 144)).sum().backward()
            recording = planner().recording
            longest = max(longest, 0 if recording is None else len(recording.segments))
        assert 0 < longest <= LONGEST_STEP and planner().recording is None


@pytest.mark.slow
def test_segments_that_are_long_together_are_not_all_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over elements is cut into segments of 100,000 operators, and 64 of these took gigabytes beside the budget."""
    most = 300
    monkeypatch.setattr("port_agent.intercept.decisions.step_planner.OPERATORS_KEPT", most)
    training, recorded = Training(), 0
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        training.accumulate(1, 3, 2)
        for rows in range(4, 4 + LONGEST_STEP):
            training.model(torch.ones(rows, 144)).sum().backward()
            history, recording = planner()._history, planner().recording
            assert len(history) == 1 or sum(map(len, set(history))) <= most
            recorded = max(recorded, 0 if recording is None else len(recording))
        assert 0 < recorded <= most and len(history) < LONGEST_STEP


@pytest.mark.process
def test_steps_of_two_kinds_in_turn_are_planned_as_one(tmp_path: Path) -> None:
    plain, expected = [Training(), Training(layers=4)], []
    for turn in range(12):
        expected.append(plain[turn % 2].step())
    trained, found = [Training(), Training(layers=4)], []
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        for turn in range(12):
            found.append(trained[turn % 2].step())
            search = planner()._search
            if search is not None:
                assert len(search.recording.segments) == 4
                search.process.wait(timeout=120)
                break
        else:
            raise AssertionError("never planned")
    assert found == expected[: len(found)]


@pytest.mark.process
def test_a_plan_keeps_to_the_limits_that_were_given(tmp_path: Path, cache: Path) -> None:
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path, step_deadline="1h", writes_per_step="1G").resizing() as active:
        for _ in steps_until_planned(training):
            pass
        training.step()
        assert (active.report.step_written_bytes or 0) > 1 << 10
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path, writes_per_step="1K").resizing() as active:
        searched = False
        until = time.monotonic() + 120
        while not searched and time.monotonic() < until:
            training.step()
            search = planner()._search
            if search is not None:
                assert math.isinf(search.before.seconds), "the step before it wrote more than it may"
                search.process.wait(timeout=120)
                searched = True
        assert searched, "planned anew: the plan that is kept is for other limits"
        training.step()
        assert active.report.plan is None, "none writes so little"


@pytest.mark.process
def test_random_plans_change_no_bit(tmp_path: Path) -> None:
    plain = Training()
    expected = [plain.step() for _ in range(TURNS)]
    dice = random.Random(0)
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        assert [_with_random_plan(training, dice) for _ in range(TURNS)] == expected
    for mine, theirs in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def _with_random_plan(training: Training, dice: random.Random) -> float:
    running = _Running._of_this_process
    assert running is not None
    running.interceptor.planner.close()
    for trace in running.interceptor.book.traces:
        places = range(len(trace.entries))
        leaving = {p: {dice.randrange(4): dice.random() < 0.5} for p in places if dice.random() < 0.4}
        trace.plan = SegmentPlan(leaving, {p for p in places if dice.random() < 0.4})
    return training.step()


@pytest.mark.process
def test_a_plan_that_moves_more_than_before_goes(tmp_path: Path, cache: Path) -> None:
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing() as active:
        for _ in steps_until_planned(training):
            pass
        adopted = planner().adopted
        assert adopted is not None
        adopted.traffic.clear()
        adopted.before = NOTHING_IS_BETTER
        for _ in range(5):
            training.step()
        assert active.report.plan is None and planner().adopted is None
        assert list(cache.iterdir()) == []


@pytest.mark.process
def test_a_damaged_plan_is_made_anew(tmp_path: Path, cache: Path) -> None:
    for _ in range(2):
        with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
            for _ in steps_until_planned(Training()):
                pass
        (kept,) = cache.iterdir()
        kept.write_bytes(b"\x93 no plan")
        assert kept_plans.read_plan(kept.name) is None


@pytest.mark.process
def test_the_search_ends_with_the_budget(tmp_path: Path) -> None:
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        while (search := planner()._search) is None:
            training.step()
    assert search.process.returncode is not None
    assert search.plans.closed


@pytest.mark.process
def test_a_plan_that_promises_no_less_is_not_adopted(tmp_path: Path, cache: Path) -> None:
    training = Training()
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing() as active:
        while (search := planner()._search) is None:
            training.step()
        search.before = NOTHING_IS_BETTER
        search.process.wait(timeout=120)
        training.step()
        assert planner()._search is None and search.seen > 0
        assert active.report.plan is None and not cache.exists()


@pytest.mark.process
def test_while_the_program_is_held_nothing_searches_and_later_it_begins_anew(tmp_path: Path, cache: Path) -> None:
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing() as active:
        training = Training()
        while (search := planner()._search) is None:
            training.step()
        active.interceptor.hold()
        assert search.process.returncode is not None and planner()._search is None
        active.interceptor.go_on()
        while (again := planner()._search) is None:
            training.step()
        assert again is not search


def test_a_step_is_the_shortest_run_that_came_twice() -> None:
    forward, update, other = Trace(), Trace(), Trace()
    assert repeated([forward, update, forward]) is None
    assert repeated([other, forward, update, forward, update]) == (forward, update)
    assert repeated([forward, forward, update, forward, forward, update]) == (forward, forward, update)


def test_flash_is_worth_a_little_time() -> None:
    before = StepTraffic(2.0, 100)
    assert not StepTraffic(1.9, 100).worse_than(before, 0.0, 0.5) and not before.worse_than(before, 0.0, 0.5)
    assert StepTraffic(2.1, 0).worse_than(before, 0.0, 0.5), "where nothing wears out, time decides"
    assert not StepTraffic(2.4, 50).worse_than(before, 1.0, 0.5)
    assert StepTraffic(2.6, 50).worse_than(before, 1.0, 0.5), "longer than it may take"
    assert StepTraffic(1.9, 101).worse_than(before, 1.0, 0.5)


@pytest.mark.parametrize("wear", [0.0, 5e-6])
def test_where_flash_wears_out_paging_counts_as_slow(
    wear: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("port_agent.intercept.budget.wear_joules_per_byte", lambda folder: wear)
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        fast, slow = 2e-9, 1e-5
        monkeypatch.setattr(planner()._residency, "paging_seconds", lambda nbytes: fast * nbytes)
        assert (planner().paging_seconds(1000) > 2 * 1000 * fast) == (wear > 0)
        monkeypatch.setattr(planner()._residency, "paging_seconds", lambda nbytes: slow * nbytes)
        assert planner().paging_seconds(1000) == 1000 * slow


def test_a_step_is_planned_with_this_machines_watts_and_the_price_of_its_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("port_agent.intercept.budget.wear_joules_per_byte", lambda folder: 5e-6)
    with budget(tensors=LIMIT, page_dir=tmp_path).resizing():
        device, power = planner()._device(), power_with(torch.get_num_threads())
        assert device.flash.wear_joules_per_byte == 5e-6
        assert (device.static_watts, device.compute_watts) == (power.static_watts, power.compute_watts)
