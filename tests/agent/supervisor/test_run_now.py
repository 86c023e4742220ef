"""A job that is to run now waits for nobody and no time, and for what protects the machine."""

from dataclasses import replace
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pytest

from port_agent.facts import Answer, Facts, IdleSignal, Power
from port_agent.jobs.job import JobRequestError, JobState
from port_agent.policy.decide import Memory, Now, Policy, TimeWindow, decide
from port_agent.supervisor.dispatch import Dispatcher
from port_agent.supervisor.run_now import without_waiting
from port_agent.supervisor.service import Service
from tests.agent.live_daemon import LONG, go
from tests.agent.supervisor.parts import TRAIN, parts

IN_USE = Facts(power=Power.EXTERNAL, idle_signals=(IdleSignal("input", Answer.NO, "typed"),), temperature_c=50.0)
NIGHTS = tuple(TimeWindow(day, time(22), time(7)) for day in range(7))
NOON = Now(1000.0, datetime(2026, 6, 3, 12, 0))


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({}, {"go"}),
        ({"power": Power.BATTERY}, {"battery"}),
        ({"temperature_c": 90.0}, {"hot"}),
        ({"battery_percent": 5.0}, {"low-battery"}),
    ],
)
def test_what_it_waits_for_and_what_not(change: dict[str, Any], codes: set[str]) -> None:
    policy, stopped = Policy(windows=NIGHTS), Memory(stopped_at_s=999.0)
    facts = replace(IN_USE, **change)
    assert {"in-use", "window"} <= set(decide(facts, policy, NOON, stopped).codes)
    assert set(decide(facts, without_waiting(policy), NOON, stopped).codes) == codes


@pytest.mark.process
@go
async def test_it_comes_before_all_others_which_stand_back_until_it_is_over(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context, dispatcher, service = made.context, Dispatcher(made.context), Service(made.context)
        first, wanted = made.add("first", LONG, priority=9), made.add("wanted", LONG)
        dispatcher.act(TRAIN)
        await made.until(lambda: context.runners.of_job(first.id) is not None)
        context.pause.begin(None)
        assert (await service.run_now("wanted", 3600.0)).state == "queued"
        assert context.pause.left_s() is None and context.policy.idle_for_s == 0.0
        while context.runners.of_job(wanted.id) is None:
            dispatcher.act(TRAIN)
            context.wake.clear()
            await context.wake.wait()
        assert context.store.get(first.id).reason == "left: you want another job to run now"
        context.end_run_now()
        assert context.run_now is not None
        made.clock.pass_time(3600.0)
        context.end_run_now()
        assert context.run_now is None


@go
async def test_it_ends_with_its_job_and_with_a_pause(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context, service = made.context, Service(made.context)
        job = made.add("birds")
        await service.run_now("birds", None)
        context.end_run_now()
        assert context.run_now is not None
        await service.pause_all(60.0)
        assert context.run_now is None
        await service.run_now("birds", None)
        context.store.save(replace(context.store.get(job.id), state=JobState.FINISHED))
        context.end_run_now()
        assert context.run_now is None
        with pytest.raises(JobRequestError, match="finished; submit it again"):
            await service.run_now("birds", None)
