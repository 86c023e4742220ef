"""Which job runs next, continues or leaves: the test decides, real workers train."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pytest

from port_agent.facts import Facts
from port_agent.jobs.job import Job, JobKind, JobState
from port_agent.policy.config import Config
from port_agent.policy.decide import DAYS, Memory, PolicyDecision, ResourceLimits, State, TimeWindow
from port_agent.supervisor.dispatch import BEFORE_CLOSING_S, BOARD_PATIENCE_S, WARM_MARGIN_C, Dispatcher
from port_agent.supervisor.job.runner import LAST_COMMIT_S
from port_agent.supervisor.job.sharing import BOARD_WORKER_BYTES
from port_agent.supervisor.job.silence_monitor import RESTART_AFTER, SHORTEST_S
from port_agent.supervisor.job.worker_process import RequestedState, WorkerPhase
from port_agent.system.clock import local_time
from port_agent.worker.protocol import DeviceInterrupted
from tests.agent.live_daemon import BUNDLE, LONG, go, process_state, until
from tests.agent.supervisor.parts import ANY_TIME, TRAIN, Parts, parts

pytestmark = pytest.mark.process

MIB = 1 << 20
HUGE = {**BUNDLE, "plans": [{"peak_bytes": 900 * MIB, "seconds": 0.01, "joules": 0.1}]}
HALF_A_GIB = replace(ANY_TIME, not_in_use=ResourceLimits(memory_bytes=512 * MIB))


def decided(state: State, *reasons: str) -> PolicyDecision:
    return PolicyDecision(state, reasons, (), Memory())


async def training(made: Parts, dispatcher: Dispatcher) -> Job:
    """Start the next job; return it once its worker trains."""
    dispatcher.act(TRAIN)
    await made.until(lambda: made.context.runners.host.phase is WorkerPhase.TRAINING)
    job = made.context.runners.host.job
    assert job is not None
    return job


async def left(made: Parts) -> None:
    await made.until(lambda: made.context.runners.host.job is None)


@go
async def test_the_best_job_that_can_run_is_started(tmp_path: Path) -> None:
    async with parts(tmp_path, HALF_A_GIB) as made:
        store = made.context.store
        paused = made.add("paused", priority=9)
        store.save(replace(paused, state=JobState.PAUSED))
        made.add("without-data", priority=8, waits_for_data=True)
        broken = made.add("broken", priority=7)
        (store.job_dir(broken.id) / "bundle.json").write_text("{")
        huge = made.add("huge", HUGE, priority=6)
        made.add("later", LONG)
        soon = made.add("soon", LONG, deadline_at=made.clock.wall + 9000.0)
        dispatcher = Dispatcher(made.context)
        assert await training(made, dispatcher) == store.get(soon.id)
        assert store.get(broken.id).state is JobState.FAILED
        assert store.get(huge.id).state is JobState.QUEUED and made.context.health.holds(
            "job-does-not-fit", str(huge.id)
        )


@go
async def test_nothing_starts_while_what_it_learns_could_not_be_kept(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.add("birds", LONG)
        store, dispatcher = made.context.store, Dispatcher(made.context)
        (tmp_path / "state/jobs").rename(tmp_path / "state/gone")
        (tmp_path / "state/jobs").write_text("in the way of every manifest")
        store.save(store.get(1))
        assert not store.flush() and store.trouble is not None
        dispatcher.act(TRAIN)
        assert made.context.runners.host.job is None
        (tmp_path / "state/jobs").unlink()
        (tmp_path / "state/gone").rename(tmp_path / "state/jobs")
        assert store.flush()
        assert (await training(made, dispatcher)).id == 1


@go
async def test_a_worker_that_stands_still_is_shown_and_started_again(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.add("birds", LONG)
        dispatcher, runner, health = Dispatcher(made.context), made.context.runners.host, made.context.health
        job = await training(made, dispatcher)
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGSTOP)
        await until(lambda: runner.pid is not None and process_state(runner.pid) == "T")
        shown = []
        for _ in range(round(RESTART_AFTER * SHORTEST_S) + 10):
            made.clock.now += 1.0
            dispatcher.act(TRAIN)
            if (status := runner.status()) is not None:
                shown.append(status.phase)
        assert shown[0] == "training" and shown[-1] == "stuck" and health.holds("worker-stuck", str(job.id))
        await left(made)
        assert made.context.store.get(job.id).state is JobState.BACKOFF


@go
async def test_only_a_lack_of_memory_leaves_no_time_for_a_last_commit(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.add("birds", LONG)
        dispatcher = Dispatcher(made.context)
        await training(made, dispatcher)
        given: list[float] = []
        made.context.runners.host.leave = lambda reason, within_s=0.0: given.append(within_s)  # type: ignore[method-assign]
        for codes in (("battery",), ("user",), ("memory", "window")):
            dispatcher.act(PolicyDecision(State.LEAVE, codes, codes, Memory()))
        assert given == [LAST_COMMIT_S, LAST_COMMIT_S, 0.0]


@go
async def test_a_decision_to_pause_keeps_the_worker_and_one_to_leave_does_not(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        job, dispatcher = made.add("birds", LONG), Dispatcher(made.context)
        await training(made, dispatcher)
        dispatcher.act(decided(State.PAUSE, "too hot"))
        await made.until(lambda: made.context.runners.host.phase is WorkerPhase.PAUSED)
        dispatcher.act(TRAIN)
        await made.until(lambda: made.context.runners.host.phase is WorkerPhase.TRAINING)
        dispatcher.act(decided(State.LEAVE, "on battery 20 %", "hot"))
        await left(made)
        log = (made.context.store.job_dir(job.id) / "job.log").read_text()
        assert "leaving: on battery 20 %; hot\n" in log
        assert made.context.store.get(job.id).state is JobState.QUEUED


@go
async def test_what_the_user_says_of_the_job_comes_before_the_decision(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        job, store, dispatcher = made.add("birds", LONG), made.context.store, Dispatcher(made.context)
        for said in (JobState.PAUSED, JobState.CANCELLED):
            running = await training(made, dispatcher)
            store.save(replace(running, state=said, reason="as you said"))
            dispatcher.act(decided(State.PAUSE, "too hot"))
            assert made.context.runners.host.requested is RequestedState.LEAVE
            await left(made)
            assert (store.get(job.id).state, store.get(job.id).reason) == (said, "as you said")
            store.save(replace(store.get(job.id), state=JobState.QUEUED))


@go
async def test_a_job_of_higher_priority_takes_the_place_after_a_checkpoint(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        low, dispatcher = made.add("low", {**LONG, "checkpoint_every": 10**6}), Dispatcher(made.context)
        await training(made, dispatcher)
        made.add("twin", LONG, deadline_at=1.0)
        dispatcher.act(TRAIN)
        assert made.context.runners.host.requested is RequestedState.TRAIN, "an equal does not push another aside"
        high = made.add("high", LONG, priority=1)
        dispatcher.act(TRAIN)
        await left(made)
        assert made.context.store.get(low.id).measured.checkpoint_bytes
        assert (await training(made, dispatcher)).id == high.id


@go
async def test_a_job_that_cannot_start_pushes_none_aside(tmp_path: Path) -> None:
    """Its memory is not there: the job that runs would leave for nothing, at every look anew."""
    async with parts(tmp_path, HALF_A_GIB) as made:
        low, dispatcher = made.add("low", {**LONG, "checkpoint_every": 10**6}), Dispatcher(made.context)
        await training(made, dispatcher)
        huge = made.add("huge", HUGE, priority=6)
        dispatcher.act(TRAIN)
        step = made.context.store.get(low.id).step
        await until(lambda: made.context.store.get(low.id).step > step + 1)
        assert made.context.runners.host.requested is RequestedState.TRAIN
        assert made.context.store.get(low.id).measured.checkpoint_bytes is None
        made.add("fits", LONG, priority=1)
        dispatcher.act(TRAIN)
        await left(made)
        assert (await training(made, dispatcher)).spec.name == "fits"
        roomy = replace(ANY_TIME, not_in_use=ResourceLimits(memory_bytes=2048 * MIB))
        made.context.config = Config(policy=roomy)
        dispatcher.act(TRAIN)
        await left(made)
        assert (await training(made, dispatcher)).id == huge.id
        assert made.context.store.get(low.id).attempts == 1


@go
async def test_a_backoff_is_waited_for_on_the_clock_that_does_not_jump(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        job, dispatcher = made.add("birds", LONG), Dispatcher(made.context)
        failed = replace(job, state=JobState.BACKOFF, failures=1, retry_after_s=30.0)
        made.context.store.save(failed)
        dispatcher.act(TRAIN)
        made.clock.wall += 1e6
        made.clock.now += 29.9
        dispatcher.act(TRAIN)
        assert made.context.runners.host.job is None
        made.context.store.save(replace(failed, failures=2, retry_after_s=60.0))
        dispatcher.act(TRAIN)
        made.clock.now += 59.9
        dispatcher.act(TRAIN)
        assert made.context.runners.host.job is None, "another failure counts from when it was seen"
        made.clock.now += 0.2
        assert (await training(made, dispatcher)).id == job.id
        dispatcher.act(TRAIN)
        assert made.context.retry_at_s == {}


@go
async def test_shortly_before_the_window_closes_one_checkpoint_is_asked_for(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        job, dispatcher = made.add("birds", {**LONG, "checkpoint_every": 10**6}), Dispatcher(made.context)
        await training(made, dispatcher)
        now = local_time(made.clock.wall)
        noon = datetime.combine(now, time(12)).timestamp()
        window = TimeWindow(now.weekday(), time(11), time(12))
        assert DAYS[window.weekday] == now.strftime("%a").lower()
        made.context.config = Config(policy=replace(ANY_TIME, windows=(window,)))
        for before_s, wanted in ((BEFORE_CLOSING_S + 1, False), (BEFORE_CLOSING_S - 1, True)):
            made.clock.wall = noon - before_s
            made.clock.now += 100.0
            dispatcher.act(TRAIN)
            if wanted:
                await made.until(lambda: bool(made.context.store.get(job.id).measured.checkpoint_bytes))
            assert bool(made.context.store.get(job.id).measured.checkpoint_bytes) is wanted
        assert made.context.runners.host.requested is RequestedState.TRAIN


@go
async def test_limits_follow_whether_somebody_uses_the_device(tmp_path: Path) -> None:
    policy = replace(HALF_A_GIB, in_use=ResourceLimits(memory_bytes=150 * MIB))
    async with parts(tmp_path, policy) as made:
        made.add("birds", LONG)
        Dispatcher(made.context).act(decided(State.TRAIN_GENTLY))
        job = made.context.runners.host.job
        assert job is not None and job.plan == 1, "only the smaller plan fits beside somebody"


@go
async def test_near_the_limit_of_heat_the_plan_of_least_power_runs(tmp_path: Path) -> None:
    cool = {"peak_bytes": 100 * MIB, "seconds": 1.0, "joules": 2.0}
    quick = {"peak_bytes": 100 * MIB, "seconds": 0.1, "joules": 1.0}
    async with parts(tmp_path) as made:
        made.add("birds", {**LONG, "plans": [quick, cool]})
        dispatcher = Dispatcher(made.context)
        edge = ANY_TIME.max_temperature_c - WARM_MARGIN_C
        for celsius, plan in ((edge, 0), (edge + 0.1, 1), (None, 0)):
            made.context.admission.facts = Facts(temperature_c=celsius)
            dispatcher.act(TRAIN)
            job = made.context.runners.host.job
            assert job is not None and job.plan == plan
            made.context.runners.host.leave("next")
            await left(made)


def on_board(made: Parts, port: Path, name: str, **spec: Any) -> Job:
    """Put a job for the board on `port` into the store."""
    return made.add(name, {**LONG, "plans": []}, kind=JobKind.MCU, arguments=("--port", str(port)), **spec)


LOOK_S = 0.005
"""Between two looks of `until`."""


async def all_training(made: Parts, dispatcher: Dispatcher, *jobs: Job) -> None:
    """Look until exactly these jobs train; time passes meanwhile, or a worker that failed
    would never be tried again.
    """
    wanted = sorted(job.id for job in jobs)

    def trains() -> bool:
        made.clock.now += LOOK_S
        dispatcher.act(TRAIN)
        busy = made.context.runners.busy().values()
        return wanted == sorted(job.id for runner, job in busy if runner.phase is WorkerPhase.TRAINING)

    def found() -> str:
        phases = [(job.id, runner.phase) for runner, job in made.context.runners.busy().values()]
        return f"{phases}, {[(job.id, job.state, job.reason) for job in made.context.store.all()]}"

    await until(trains, found)


@go
async def test_this_computer_and_two_boards_train_at_the_same_time(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        host, dispatcher = made.add("birds", LONG), Dispatcher(made.context)
        left, right = on_board(made, tmp_path / "left", "left"), on_board(made, tmp_path / "right", "right")
        later = on_board(made, tmp_path / "right", "later")
        await all_training(made, dispatcher, host, left, right)
        store = made.context.store
        store.save(replace(store.get(left.id), state=JobState.PAUSED))
        await all_training(made, dispatcher, host, right)
        store.save(replace(store.get(right.id), state=JobState.CANCELLED))
        await all_training(made, dispatcher, host, later)
        assert store.get(left.id).state is JobState.PAUSED and store.get(host.id).attempts == 1
        dispatcher.act(decided(State.PAUSE, "too hot"))
        await until(lambda: {run.phase for run in made.context.runners.statuses()} == {"paused"})
        dispatcher.act(decided(State.LEAVE, "on battery"))
        await until(lambda: not made.context.runners.busy())


@go
async def test_a_better_job_takes_the_place_of_its_board_only(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        host, dispatcher = made.add("birds", LONG), Dispatcher(made.context)
        left, right = on_board(made, tmp_path / "left", "left"), on_board(made, tmp_path / "right", "right")
        await all_training(made, dispatcher, host, left, right)
        better = on_board(made, tmp_path / "right", "better", priority=3)
        await all_training(made, dispatcher, host, left, better)
        assert [made.context.store.get(job.id).attempts for job in (host, left, right)] == [1, 1, 1]


@go
async def test_memory_is_shared_by_priority(tmp_path: Path) -> None:
    """The computer's job takes what boards leave; where that is too little, the lower priority gives way."""
    both = 230 * MIB + BOARD_WORKER_BYTES  # the larger plan of the computer's job may take 226 MiB, the smaller 121
    policy = replace(ANY_TIME, not_in_use=ResourceLimits(memory_bytes=both - 1 * MIB * 10))
    async with parts(tmp_path, policy) as made:
        host, dispatcher = made.add("birds", LONG), Dispatcher(made.context)
        board = on_board(made, tmp_path / "left", "left")
        await all_training(made, dispatcher, host, board)
        assert made.context.store.get(host.id).plan == 1, "the larger does not fit beside the board"
        limits = [run.limits.memory_bytes for run in (r._run for r in made.context.runners) if run is not None]
        whole = policy.not_in_use.memory_limit(None)
        assert whole is not None and sum(limit or 0 for limit in limits) <= whole
        made.context.config = Config(policy=replace(ANY_TIME, not_in_use=ResourceLimits(memory_bytes=150 * MIB)))
        await all_training(made, dispatcher, host)
        store = made.context.store
        assert store.get(host.id).attempts == 1, (
            "what the board still holds until it has left does not send the host job away"
        )
        store.save(replace(store.get(board.id), spec=replace(store.get(board.id).spec, priority=1)))
        made.clock.now += 100.0
        await all_training(made, dispatcher, board)
        assert made.context.health.holds("job-does-not-fit", str(host.id))


@go
async def test_a_job_whose_board_stays_away_gives_its_memory_back(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        board, dispatcher = on_board(made, tmp_path / "port", "wrist"), Dispatcher(made.context)
        host = made.add("birds", LONG)
        await all_training(made, dispatcher, host, board)
        runner = made.context.runners.of_job(board.id)
        assert runner is not None
        runner._on_event(DeviceInterrupted(reason="the port is gone"))
        made.clock.now += BOARD_PATIENCE_S + 1.0
        runner._on_event(DeviceInterrupted(reason="the port is gone"))
        await until(lambda: act_and(dispatcher, lambda: made.context.runners.of_job(board.id) is None))
        waiting = made.context.store.get(board.id)
        assert (waiting.state, waiting.reason) == (JobState.QUEUED, "the port is gone")
        for _ in range(3):
            dispatcher.act(TRAIN)
        assert made.context.runners.of_job(board.id) is None and made.context.runners.of_job(host.id) is not None
        (tmp_path / "port").touch()
        await all_training(made, dispatcher, host, board)
        assert made.context.without_board == {}


def act_and(dispatcher: Dispatcher, condition: Callable[[], bool]) -> bool:
    dispatcher.act(TRAIN)
    return condition()
