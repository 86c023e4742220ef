"""Programs that attached themselves, steered by a real daemon over its real socket."""

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.control.client import ControlError
from port_agent.jobs.job import JobState
from port_agent.supervisor.job import attachments
from port_agent.worker.attach import AttachError
from port_agent.worker.protocol import (
    CheckpointWritten,
    LeaveNow,
    PauseTraining,
    PlanSwitched,
    ReleaseMemory,
    ResumeTraining,
    TrainingFailed,
    TrainingFinished,
)
from tests.agent.live_daemon import CONFIG, LONG, ROOT, Live, daemon, go, running
from tests.agent.supervisor.job.attached_program import MIB, ObedientProgram, attached


@asynccontextmanager
async def program_of(live: Live, **said: object) -> AsyncIterator[ObedientProgram]:
    """Attach a program to a daemon in this loop."""
    program = await live.ask(ObedientProgram, live.client.path, **said)
    try:
        yield program
    finally:
        await live.ask(program.end)


async def until_heard(live: Live, program: ObedientProgram, *kinds: type) -> None:
    """Wait until a program has heard exactly these commands; a pause before another command
    only if it is one of them.
    """

    def heard() -> list[type]:
        return [type(one) for one in program.heard if PauseTraining in kinds or not isinstance(one, PauseTraining)]

    await live.until(lambda: heard() == list(kinds), f"heard {program.heard}")


@go
async def test_it_runs_while_the_policy_says_so_and_its_work_is_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        live.plug(False)
        async with program_of(live) as program:
            await live.until(lambda: live.context.admission.decision is not None)
            assert program.heard == [] and live.job(program.job).state is JobState.QUEUED
            live.plug(True)
            await until_heard(live, program, ResumeTraining)
            program.do_step(paged_out_bytes=5 * MIB)
            program.do_step(paged_out_bytes=90 * MIB, unworn_bytes=90 * MIB)
            await live.until_step(program.job, 2)
            status = (await live.ask(live.client.get, "/v1/status"))["job"]
            assert (status["name"], status["kind"], status["phase"]) == ("train", "attached", "training")
            assert (status["pid"], status["planned_peak_bytes"]) == (os.getpid(), 300 * MIB)
            assert status["owner"] == (await live.ask(live.client.get, "/v1/jobs"))["jobs"][0]["owner"] != ""
            live.plug(False)
            await live.until(lambda: live.context.runners.host.job is None)
            assert isinstance(program.heard[-1], ReleaseMemory) and program.heard[-1].reason == "on battery 80 %"
            await live.until(lambda: live.context.wear.today_bytes() >= 12 * MIB)  # a step's, and of giving memory back
            assert live.context.wear.today_bytes() < 90 * MIB, "what went to compressed RAM"
            live.plug(True)
            await until_heard(live, program, ResumeTraining, ReleaseMemory, ResumeTraining)
            report = await live.ask(live.client.get, "/v1/energy?since=0")
            assert report["labels"] == {str(program.job): f"{program.job} (train)"}
            assert next(row for row in report["jobs"] if row["name"] == str(program.job))["steps"] == 2
            program.tell(TrainingFinished(step=2))
        await live.until_state(program.job, JobState.FINISHED)
        assert live.context.runners.host.job is None


@go
async def test_a_user_pauses_resumes_and_cancels_it(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        place = ["--runtime-dir", str(live.settings.runtime_dir)]
        async with program_of(live) as program:
            await until_heard(live, program, ResumeTraining)
            assert await live.ask(main, ["pause", "train", *place]) == 0
            await until_heard(live, program, ResumeTraining, ReleaseMemory)
            await live.until(lambda: live.context.runners.host.job is None)
            assert live.job(program.job).state is JobState.PAUSED
            assert await live.ask(main, ["resume", "train", *place]) == 0
            await until_heard(live, program, ResumeTraining, ReleaseMemory, ResumeTraining)
            assert await live.ask(main, ["cancel", "train", *place]) == 0
            await live.until(lambda: live.context.runners.host.job is None)
            assert isinstance(program.heard[-1], LeaveNow)
            job = live.job(program.job)
            assert (job.state, job.reason) == (JobState.CANCELLED, "cancelled by you")
            with pytest.raises(ControlError, match="start that program again"):
                await live.ask(live.client.post, f"/v1/jobs/{program.job}/resume")


@go
async def test_a_waiting_program_is_cancelled_too(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        live.plug(False)
        async with program_of(live) as program:
            await live.ask(live.client.post, f"/v1/jobs/{program.job}/cancel")
            await until_heard(live, program, LeaveNow)
            assert live.job(program.job).state is JobState.CANCELLED


@pytest.mark.process
@go
async def test_one_job_runs_at_a_time_attached_or_not(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        async with program_of(live) as first, program_of(live) as second:
            assert (first.name, second.name) == ("train", f"train-{os.getpid()}")
            await until_heard(live, first, ResumeTraining)
            number = await live.submit(LONG, name="bundle", priority=1)
            await live.until_step(number, 1)
            await until_heard(live, first, ResumeTraining, ReleaseMemory)
            assert second.heard == []
            await live.ask(live.client.post, f"/v1/jobs/{number}/cancel")
            await until_heard(live, first, ResumeTraining, ReleaseMemory, ResumeTraining)
            await live.ask(first.end)
            await until_heard(live, second, ResumeTraining)
        await live.until_state(second.job, JobState.FAILED)
        assert "killed" in live.job(first.job).reason
        assert live.health_codes() & {"job-given-up", "job-failing"} == set()


@go
async def test_it_keeps_its_memory_in_a_short_pause_and_long_operators_are_named(tmp_path: Path) -> None:
    config = CONFIG.replace("[storage]", "keep_in_memory = '1h'\nmax_temperature = 70\n[storage]")
    async with running(tmp_path, config) as live:
        live.heat(50.0)
        async with program_of(live) as program:
            await until_heard(live, program, ResumeTraining)
            live.heat(90.0)
            await until_heard(live, program, ResumeTraining, PauseTraining)
            await live.until(lambda: "long-operator" in live.health_codes())
            later_s = live.context.clock.monotonic_s() + 1000.0
            (item,) = (item for item in live.context.health.items(later_s) if item.code == "long-operator")
            assert "aten::mm ran on for" in item.text
            live.heat(50.0)
            await until_heard(live, program, ResumeTraining, PauseTraining, ResumeTraining)


@pytest.mark.process
@go
async def test_one_that_does_not_fit_waits_and_pushes_nobody_aside(tmp_path: Path) -> None:
    config = CONFIG + '[limits.not_in_use]\nmemory = "200M"\n'
    async with running(tmp_path, config) as live, program_of(live) as program:
        await live.until(lambda: "job-does-not-fit" in live.health_codes())
        assert program.heard == []
        number = await live.submit({**LONG, "plans": []})
        await live.until_step(number, 1)
        await live.ask(live.client.post, "/v1/jobs/train/change", priority=1)
        await live.until_step(number, live.job(number).step + 20)
        assert program.heard == [] and live.job(number).attempts == 1  # the other is not pushed aside for nothing


@go
async def test_it_is_told_how_much_of_the_cpus_it_may_take(tmp_path: Path) -> None:
    config = CONFIG + "[limits.not_in_use]\ncpu = 50\n"
    async with running(tmp_path, config) as live, program_of(live) as program:
        await until_heard(live, program, ResumeTraining)
        assert program.heard == [ResumeTraining(cpu_percent=50)]
        (tmp_path / "config.toml").write_text(config.replace("50", "100"))
        await live.ask(live.client.post, "/v1/reload")
        await until_heard(live, program, ResumeTraining, ResumeTraining)
        assert program.heard[-1] == ResumeTraining(cpu_percent=100)


@go
async def test_one_that_does_not_answer_holds_up_nobody_for_ever(tmp_path: Path) -> None:
    patience, attachments.ANSWER_PATIENCE_S = attachments.ANSWER_PATIENCE_S, 0.2
    try:
        async with running(tmp_path) as live, program_of(live) as stopped, program_of(live, name="other") as other:
            await until_heard(live, stopped, ResumeTraining)
            stopped.answers = False
            await live.ask(live.client.post, f"/v1/jobs/{stopped.job}/pause")
            await until_heard(live, other, ResumeTraining)
            await live.ask(live.client.post, f"/v1/jobs/{stopped.job}/resume")
            await live.ask(other.end)
            await live.until(lambda: live.context.runners.host.job is None)
            assert len(stopped.heard) == 2
            stopped.do_step()  # its user let it go on
            await until_heard(live, stopped, ResumeTraining, ReleaseMemory, ResumeTraining)
    finally:
        attachments.ANSWER_PATIENCE_S = patience


@pytest.mark.process
@go
async def test_after_a_restart_it_has_its_number_again_and_nothing_else_was_kept(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        program = await live.ask(ObedientProgram, live.client.path)
        await until_heard(live, program, ResumeTraining)
    assert isinstance(program.heard[-1], ReleaseMemory) and program.heard[-1].reason == "the agent is stopping"
    async with running(tmp_path) as live:
        assert live.context.store.all() == [] and not (live.settings.state_dir / "jobs" / str(program.job)).exists()
        number = await live.submit(LONG)
        assert number == program.job + 1
        async with program_of(live, job=program.job) as again:
            assert again.job == program.job
        async with program_of(live, job=number) as other:
            assert other.job == number + 1


@pytest.mark.slow
@go
async def test_so_many_are_taken_and_commands_still_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as live, AsyncExitStack() as stack:
        for number in range(attachments.MAX_ATTACHED):
            await stack.enter_async_context(program_of(live, name=f"n{number}"))
        with pytest.raises(AttachError, match="16 programs are attached"):
            await live.ask(ObedientProgram, live.client.path)
        assert len((await live.ask(live.client.get, "/v1/jobs"))["jobs"]) == attachments.MAX_ATTACHED


@go
async def test_what_is_not_for_it_to_say_is_ignored(tmp_path: Path) -> None:
    async with running(tmp_path) as live, program_of(live) as program:
        await until_heard(live, program, ResumeTraining)
        program.tell(PlanSwitched(plan=7))
        program.tell(CheckpointWritten(step=1, bytes=1 << 60, wall_s=0.0))
        program.do_step()
        await live.until_step(program.job, 1)
        status = (await live.ask(live.client.get, "/v1/status"))["job"]
        assert (status["plan"], status["planned_peak_bytes"]) == (0, 300 * MIB)
        assert live.context.wear.today_bytes() < 1 << 60


@go
async def test_how_it_failed_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        async with program_of(live) as program:
            await until_heard(live, program, ResumeTraining)
            program.tell(TrainingFailed(code="ZeroDivisionError", message="division by zero"))
        job = await live.until_state(program.job, JobState.FAILED)
        assert job.reason == "division by zero"


@pytest.mark.root
def test_another_users_program_belongs_to_that_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    other = (
        "import os, sys; from pathlib import Path; from port_agent.control.client import *\n"
        "from tests.agent.supervisor.job.attached_program import attached\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "client = ControlClient(Path(sys.argv[1]))\n"
        "try: client.post('/v1/jobs/roots/cancel')\n"
        "except ControlError as error: print(error.status, error)\n"
        "with attached(client.path, name='nobodys') as program:\n"
        "    client.post('/v1/jobs/nobodys/pause'); print(client.get('/v1/jobs/nobodys')['owner'])\n"
    )
    with (
        tempfile.TemporaryDirectory() as name,
        daemon(Path(name), CONFIG + '[control]\ngroup = "nogroup"\n') as client,
    ):
        Path(name).chmod(0o755)
        with attached(client.path, name="roots"):
            done = subprocess.run(
                [sys.executable, "-c", other, str(client.path.parent)], capture_output=True, text=True, cwd=ROOT
            )
            assert done.returncode == 0, done.stderr
            refused, owner = done.stdout.splitlines()
            assert refused.startswith("403 job roots belongs to user 0") and owner == "nobody", done
            assert client.get("/v1/jobs/roots")["state"] == "running"
