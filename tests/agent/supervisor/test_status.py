"""What the supervisor says it does, and why, for every situation it can be in."""

from dataclasses import replace
from datetime import datetime, time
from pathlib import Path

import pytest

from port_agent.energy.media import FlashPrices, medium_of
from port_agent.facts import Answer, Facts, IdleSignal, Power
from port_agent.jobs.job import Job, JobMeasurements, JobSpec, JobState
from port_agent.policy.config import Config
from port_agent.policy.decide import TimeWindow
from port_agent.supervisor.dispatch import Dispatcher
from port_agent.supervisor.job.exit_status import LEFT, left_because
from port_agent.supervisor.job.worker_process import WorkerPhase
from port_agent.supervisor.status import agent_status, device_state, job_summary, pause_text
from port_agent.system.clock import local_time
from port_planner.ir.costs import MediumKind
from tests.agent.live_daemon import LONG, go
from tests.agent.supervisor.parts import ANY_TIME, TRAIN, Parts, parts


def headline(made: Parts) -> tuple[str, tuple[str, ...]]:
    shown = agent_status(made.context)
    return shown.state, shown.reasons


@go
async def test_the_headline_without_a_worker(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        assert headline(made) == ("idle", ("no jobs; `port-agent job submit job.port` adds one",))
        job = made.add("birds")
        assert headline(made) == ("waiting", ("starting",)), "nothing was decided yet"
        made.context.admission.decision = TRAIN
        assert headline(made) == ("waiting", ("1 (birds): queued",))
        made.context.store.save(replace(job, state=JobState.BACKOFF, reason="killed by SIGSEGV"))
        for number in range(9):
            made.add(f"more{number}")
        state, reasons = headline(made)
        assert (state, reasons[0], len(reasons)) == ("waiting", "1 (birds): killed by SIGSEGV", 5)
        made.context.admission.decision = replace(TRAIN, state=type(TRAIN.state).LEAVE, reasons=("on battery 20 %",))
        assert headline(made) == ("waiting", ("on battery 20 %",))
        assert not agent_status(made.context).may_train


@go
async def test_what_made_a_job_leave_is_said_only_while_it_is_so(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        job = made.add("birds")
        made.context.store.save(
            replace(job, reason=left_because(LEFT, "paused by you; `port-agent job resume` continues"))
        )
        held = replace(TRAIN, state=type(TRAIN.state).LEAVE, reasons=("paused by you",))
        for decision, shown in ((held, "left: paused by you; `port-agent job resume` continues"), (TRAIN, "")):
            made.context.admission.decision = decision
            (waiting,) = agent_status(made.context).waiting
            assert waiting.reason == shown
        assert headline(made) == ("waiting", ("1 (birds): queued",))


@pytest.mark.process
@go
async def test_the_headline_with_a_worker(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.add("birds", LONG)
        made.add("cats")
        context = made.context
        context.admission.decision = replace(TRAIN, reasons=("left alone",))
        Dispatcher(context).act(TRAIN)
        assert headline(made) == ("starting", ("left alone",))
        await made.until(lambda: context.runners.host.phase is WorkerPhase.TRAINING)
        assert headline(made) == ("training", ("left alone",))
        shown = agent_status(context)
        assert shown.job is not None and (shown.job.name, shown.job.plans) == ("birds", 2)
        assert [job.name for job in shown.waiting] == ["cats"], "the job that runs does not wait"
        context.runners.host._run.waits_for = "board gone"  # type: ignore[union-attr]
        assert headline(made) == ("training", ("board gone", "left alone"))
        context.runners.host.pause()
        assert headline(made)[0] == "paused"
        context.runners.host.leave("enough")
        assert headline(made)[0] == "leaving"


@go
async def test_moments_and_spans(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.clock.pass_time(60.0)
        context, clock = made.context, made.clock
        assert (agent_status(context).uptime_s, agent_status(context).paused_until) == (60.0, None)
        for for_s, shown in ((5.0, clock.wall + 5.0), (None, None)):
            context.pause.begin(for_s)
            assert agent_status(context).paused_until == shown
        assert pause_text(context) == "paused by you"
        context.pause.begin(3600.0)
        assert pause_text(context) == f"paused by you until {local_time(clock.wall + 3600.0):%a %d %b %H:%M}"
        context.pause.end()
        assert (pause_text(context), agent_status(context).paused_until) == ("", None)
        noon = datetime.combine(local_time(clock.wall), time(12))
        clock.wall = noon.timestamp()
        later = TimeWindow(noon.weekday(), time(13), time(14))
        context.config = Config(policy=replace(ANY_TIME, windows=(later,)))
        assert agent_status(context).next_window == clock.wall + 3600.0
        clock.wall += 3600.0
        assert agent_status(context).next_window is None
        context.wear.add(4096)
        assert agent_status(context).flash_written_today_bytes == 4096


@go
async def test_a_line_about_a_job(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context, now = made.context, made.clock.now
        job = Job(3, JobSpec("birds", "b"), 5.0, step=10, total_steps=40, measured=JobMeasurements(step_s=2.0))
        assert job_summary(context, job).eta_s == 60.0
        assert job_summary(context, replace(job, state=JobState.CANCELLED)).eta_s is None
        assert job_summary(context, replace(job, total_steps=None)).eta_s is None
        waiting = replace(job, state=JobState.BACKOFF, failures=1)
        assert job_summary(context, waiting).retry_in_s is None, "its failure was not looked at yet"
        for at, left in ((now + 30.0, 30.0), (now - 5.0, 0.0)):
            context.retry_at_s[3] = (1, at)
            assert job_summary(context, waiting).retry_in_s == left
            assert job_summary(context, job).retry_in_s is None


@pytest.mark.parametrize("answer", Answer)
def test_what_no_sensor_knows_is_unknown_and_not_zero(answer: Answer) -> None:
    facts = Facts(power=Power.EXTERNAL, online=answer, idle_signals=(IdleSignal("mouse", answer, "moved"),))
    shown = device_state(facts)
    assert (shown.power, shown.online, shown.metered) == ("external", answer.value, "unknown")
    assert (shown.battery_percent, shown.temperature_c, shown.free_disk_bytes) == (None, None, None)
    assert [(signal.name, signal.idle, signal.detail) for signal in shown.idle_signals] == [
        ("mouse", answer.value, "moved")
    ]


@go
async def test_how_long_the_card_lasts(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context = made.context
        assert agent_status(context).flash_life is None, "nobody can tell what it lies on"
        context.medium = medium_of(MediumKind.DISK, FlashPrices())
        assert agent_status(context).flash_life is None, "it does not wear out"
        context.medium, context.used_life = medium_of(MediumKind.EMMC, FlashPrices(endurance_bytes=10**13)), 0.3
        life = agent_status(context).flash_life
        assert life is not None and (life.medium, life.assumed, life.years_left) == ("eMMC", False, None)
        context.wear.add(10**9)
        life = agent_status(context).flash_life
        assert life is not None and life.left_bytes == 7 * 10**12
        assert life.years_left == pytest.approx(7000 / 365.25)
