"""The whole supervisor in this process, with real worker processes, a real socket and a fake /sys."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from port_agent.control.client import ControlClient, ControlError
from port_agent.facts.linux import LinuxPlatform
from port_agent.jobs.job import JobState
from port_agent.policy.config import Config
from port_agent.supervisor import dispatch
from port_agent.supervisor.context import HINT_SETTING, Settings
from port_agent.supervisor.daemon import Daemon
from port_agent.supervisor.job.plan_choice import data_limit, memory_max
from port_agent.supervisor.job.worker_process import RequestedState, WorkerPhase
from port_agent.system.clock import SystemClock
from port_agent.system.locks import InstanceError
from tests.agent.facts.machines import fake_program
from tests.agent.live import KINDS, seams
from tests.agent.live_daemon import BUNDLE, CONFIG, LONG, go, process_state, running, undisturbed, until
from tests.agent.trees import supply_tree, write_tree

pytestmark = pytest.mark.process


@go
async def test_a_job_is_trained_and_its_result_fetched(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        number = await live.submit(BUNDLE, name="birds")
        job = await live.until_state(number, JobState.FINISHED)
        assert (job.step, job.total_steps, job.attempts) == (30, 30, 1)
        assert job.planned_joules == pytest.approx(3.0)
        await live.ask(live.client.download, f"/v1/jobs/{number}/result", tmp_path / "out")
        assert json.loads((tmp_path / "out").read_text())["step"] == 30
        log = await live.ask(live.client.text, "/v1/jobs/birds/logs")
        assert "worker starts" in log and "finished" in log
        detail = await live.ask(live.client.get, f"/v1/jobs/{number}")
        assert [entry["kind"] for entry in detail["history"]] == ["submitted", "started", "finished"]
        status = await live.ask(live.client.get, "/v1/status")
        assert (status["state"], status["job"]) == ("idle", None)


@go
async def test_a_damaged_result_is_not_handed_out_and_is_written_again(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        number = await live.submit(BUNDLE, name="birds")
        await live.until_state(number, JobState.FINISHED)
        result = live.context.store.job_dir(number) / "out.safetensors"
        good = result.read_bytes()
        result.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        for path in (f"/v1/jobs/{number}/result", "/v1/jobs/birds/result"):
            with pytest.raises(
                ControlError, match=r"job 1 \(birds\) is damaged: .* `port-agent job resume 1`"
            ) as caught:
                await live.ask(live.client.download, path, tmp_path / "out")
            assert caught.value.status == 409 and not (tmp_path / "out").exists()
        await live.ask(live.client.post, f"/v1/jobs/{number}/resume")
        await live.until_state(number, JobState.FINISHED)
        await live.ask(live.client.download, f"/v1/jobs/{number}/result", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == good
        with pytest.raises(ControlError, match="is finished; submit it again"):
            await live.ask(live.client.post, f"/v1/jobs/{number}/resume")


@go
async def test_pulling_the_plug_stops_and_the_job_resumes_bit_exactly(tmp_path: Path) -> None:
    bundle = {**BUNDLE, "steps": 40}
    expected = await undisturbed(tmp_path / "plain", bundle)
    async with running(tmp_path) as live:
        live.plug(True)
        number = await live.submit(bundle)
        await live.until_step(number, 7)
        live.plug(False)
        await live.until(lambda: live.context.runners.host.job is None)
        assert live.job(number).state is JobState.QUEUED
        status = await live.ask(live.client.get, "/v1/status")
        assert status["reasons"] == ["on battery 80 %"]
        live.plug(True)
        job = await live.until_state(number, JobState.FINISHED)
        assert job.attempts == 2
        assert live.weights(number) == expected


@pytest.mark.process
@pytest.mark.parametrize("flaps", [4, pytest.param(100, marks=pytest.mark.long)])
def test_a_plug_that_flaps_under_a_status_that_lags_changes_no_bit(tmp_path: Path, flaps: int) -> None:
    asyncio.run(_flap(tmp_path, flaps))


async def _flap(root: Path, flaps: int) -> None:
    bundle = {**BUNDLE, "steps": 60 * flaps, "checkpoint_every": 5}
    expected = await undisturbed(root / "plain", bundle)
    async with running(root) as live:
        live.plug(True)
        number = await live.submit(bundle)
        for flap in range(flaps):
            await live.until_step(number, live.job(number).step + 1)
            live.plug(False, lags=True)
            await live.until(lambda: live.context.runners.host.job is None)
            assert (
                live.job(number).state is JobState.QUEUED
                and "ACAD offline" in live.context.admission.facts.power_detail
            )
            live.plug(False, lags=flap % 2 == 0)
            live.plug(True)
        job = await live.until_state(number, JobState.FINISHED)
        assert job.attempts == flaps + 1 and live.weights(number) == expected


@pytest.mark.process
@go
async def test_a_pulled_plug_stops_it_before_slow_sensors_are_read(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        host, read, answers, waiting = live.context.runners.host, live.context.admission.read, asyncio.Event(), False

        async def read_slowly(*arguments: Any) -> Any:
            nonlocal waiting
            waiting = live.context.runners.training and not answers.is_set()
            await answers.wait()
            waiting = False
            return await read(*arguments)

        live.context.admission.read = read_slowly
        answers.set()
        live.plug(True)
        number = await live.submit(LONG)
        for _ in range(2):
            await live.until_step(number, live.job(number).step + 3)
            seen = live.context.admission.facts
            await live.until(lambda seen=seen: live.context.admission.facts is not seen)  # type: ignore[misc]
            answers.clear()
            await live.until(lambda: waiting)
            live.plug(False)
            await live.until(lambda: host.requested is RequestedState.PAUSE)
            live.plug(True)
            answers.set()
        await live.until_step(number, live.job(number).step + 3)


@dataclass
class SleepyClock(SystemClock):
    """The clocks of this machine, as if it had slept."""

    slept: float = 0.0

    def uptime_s(self) -> float:
        return super().uptime_s() + self.slept


@pytest.mark.process
@go
async def test_sleep_is_held_off_while_a_job_may_run_and_training_goes_on_after_sleep(tmp_path: Path) -> None:
    fake_program(tmp_path, "inhibit", f'touch {tmp_path}/held\nshift\n"$@"\nrm {tmp_path}/held')
    clock = SleepyClock()

    def platform(config: Config, settings: Settings) -> LinuxPlatform:
        (tmp_path / "dev").mkdir()  # without terminals: those of this machine are used meanwhile
        made = LinuxPlatform(tmp_path / "sys", dev=tmp_path / "dev")
        made.awake_command = lambda what: (str(tmp_path / "inhibit"), what)  # type: ignore[method-assign]
        return made

    config = CONFIG.replace("idle_for = 0", "idle_for = '1s'\nbusy_cpu = 100\nbusy_cores = 1000\nbusy_pressure = 100")
    async with running(tmp_path, config, clock=clock, platform=platform) as live:
        held = tmp_path / "held"
        live.plug(True)
        assert "no job may run" in (await live.ask(live.client.get, "/v1/status"))["sleep"]
        number = await live.submit(LONG)
        await live.until_step(number, 3)
        await live.until(held.exists)
        assert "held off" in (await live.ask(live.client.get, "/v1/status"))["sleep"]
        clock.slept = 25_200.0
        await live.until(lambda: live.context.runners.host.job is None and not held.exists(), "it is given back")
        assert "woke from sleep" in str(live.context.admission.decision)
        told = await live.ask(live.client.get, "/v1/why")
        assert "the machine slept for 7 h 00 min" in str(told)
        clock_before_s, clock.monotonic_s = clock.monotonic_s, lambda: clock_before_s() + 61.0  # type: ignore[method-assign]
        await live.until(lambda: live.context.runners.host.job is not None and held.exists(), "training continues")
        live.plug(False)
        await live.until(lambda: not held.exists(), "nothing is held off on battery")
        live.plug(True)
        await live.until(lambda: live.context.sleep.held is not None)
    assert not held.exists(), "nothing is held off by an agent that stopped"


@pytest.mark.process
@go
async def test_that_logind_once_said_yes_outlives_the_agent(tmp_path: Path) -> None:
    for life in range(2):
        async with running(tmp_path) as live:
            assert live.context.admission.platform.hint_works is (life == 1)
            live.context.admission.platform.hint_works = True
            await live.until(lambda: live.context.store.setting(HINT_SETTING) is not None)


@pytest.mark.process
@go
async def test_a_paused_worker_keeps_its_memory_as_long_as_wished(tmp_path: Path) -> None:
    config = CONFIG.replace("[storage]", "keep_in_memory = '1h'\nmax_temperature = 70\n[storage]")
    async with running(tmp_path, config) as live:
        live.heat(50)
        number = await live.submit({**BUNDLE, "steps": 200})  # enough for the daemon to feel the heat before the end
        await live.until_step(number, 5)
        pid = live.context.runners.host.pid
        live.heat(90)
        await live.until(lambda: live.context.runners.host.phase is WorkerPhase.PAUSED)
        status = await live.ask(live.client.get, "/v1/status")
        assert status["state"] == "paused" and "too hot" in status["reasons"][0]
        live.heat(50)
        await live.until(lambda: live.context.runners.host.phase is not WorkerPhase.PAUSED)
        assert (await live.until_state(number, JobState.FINISHED)).attempts == 1
        assert live.context.store.history(number)[1].text.startswith(f"worker {pid} ")


@go
async def test_pause_resume_and_cancel_by_the_user(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        first, second = await live.submit(LONG, "first"), await live.submit(LONG, "second")
        await live.until_step(first, 3)
        await live.ask(live.client.post, f"/v1/jobs/{first}/pause")
        await live.until(
            lambda: live.context.runners.host.job is not None and live.context.runners.host.job.id == second
        )
        assert live.job(first).state is JobState.PAUSED
        await live.ask(live.client.post, "/v1/pause")
        await live.until(lambda: live.context.runners.host.job is None)
        await live.ask(live.client.post, f"/v1/jobs/{first}/resume")
        await live.ask(live.client.post, "/v1/resume")
        await live.until(lambda: live.context.runners.host.job is not None)
        for number in (first, second):
            await live.ask(live.client.post, f"/v1/jobs/{number}/cancel")
            assert live.job(number).state is JobState.CANCELLED
        await live.until(lambda: live.context.runners.host.job is None)
        assert {job.state for job in live.context.store.all()} == {JobState.CANCELLED}
        with pytest.raises(ControlError, match="already ended"):
            await live.ask(live.client.post, f"/v1/jobs/{first}/cancel")


@go
async def test_a_pause_for_a_time_ends_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        await live.ask(live.client.post, "/v1/pause", for_s=0.3)
        number = await live.submit(BUNDLE)
        await live.until_state(number, JobState.FINISHED)
        assert live.context.store.setting("paused") is None


@go
async def test_a_higher_priority_goes_first(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        low = await live.submit(LONG, "low")
        await live.until_step(low, 2)
        high = await live.submit(BUNDLE, "high", priority=5)
        await live.until_state(high, JobState.FINISHED)
        assert live.job(low).state in (JobState.QUEUED, JobState.RUNNING)
        log = await live.ask(live.client.text, f"/v1/jobs/{low}/logs")
        assert "leaving: its checkpoint is written" in log


@go
async def test_before_a_window_closes_a_checkpoint_is_made(tmp_path: Path) -> None:
    clock = JumpingClock()
    today = time.localtime(clock.wall_s())
    clock.offset_s = 12 * 3600 - (today.tm_hour * 3600 + today.tm_min * 60 + today.tm_sec)  # it is noon
    config = CONFIG + "[windows]\nevery = ['11:00-12:30']\n"
    async with running(tmp_path, config, clock=clock) as live:
        number = await live.submit({**LONG, "checkpoint_every": 1_000_000})
        await live.until_step(number, 5)
        live.context.runners.host._run.last_checkpoint_s -= 1000.0
        clock.offset_s += 30 * 60 - 12.0
        await live.until(lambda: bool(live.job(number).measured.checkpoint_bytes), "checkpoint")
        assert live.context.runners.host.job is not None
        clock.offset_s += 60.0
        await live.until(lambda: live.context.runners.host.job is None, "left")
        status = await live.ask(live.client.get, "/v1/status")
        assert "outside the time windows" in status["reasons"][0] and status["next_window"] is not None


@go
async def test_a_killed_worker_is_started_again_and_ends_bit_exactly(tmp_path: Path) -> None:
    bundle = {**BUNDLE, "steps": 40}
    expected = await undisturbed(tmp_path / "plain", bundle)
    async with running(tmp_path) as live:
        number = await live.submit(bundle)
        await live.until_step(number, 15)
        os.kill(live.context.runners.host.pid, signal.SIGKILL)
        job = await live.until_state(number, JobState.BACKOFF)
        assert "SIGKILL" in job.reason and job.retry_after_s == 30
        await live.ask(live.client.post, f"/v1/jobs/{number}/resume")  # do not wait 30 s
        await live.until_state(number, JobState.FINISHED)
        assert live.weights(number) == expected


@go
async def test_a_job_that_always_crashes_is_given_up_with_a_health_item(tmp_path: Path) -> None:
    config = CONFIG + "[jobs]\ngive_up_after = 3\n"
    async with running(tmp_path, config) as live:
        number = await live.submit({**BUNDLE, "faults": {"crash_at": 4}})
        for _ in range(2):
            await live.until_state(number, JobState.BACKOFF)
            live.context.retry_at_s[number] = (
                live.job(number).failures,
                0.0,
            )  # the wait itself is tested with the rules
            live.context.wake.set()
            await live.until(lambda: live.job(number).state is not JobState.BACKOFF)
        job = await live.until_state(number, JobState.FAILED)
        assert "given up after 3 failures" in job.reason and "SIGSEGV" in job.reason
        assert "job-given-up" in live.health_codes()
        status = await live.ask(live.client.get, "/v1/status")
        assert any(item["code"] == "job-given-up" and str(number) in item["remedy"] for item in status["health"])


@go
async def test_out_of_memory_takes_a_smaller_plan(tmp_path: Path) -> None:
    faults = {"memory_error_above": 150 << 20, "from": 5}
    async with running(tmp_path) as live:
        number = await live.submit({**BUNDLE, "faults": faults})
        job = await live.until_state(number, JobState.FINISHED)
        assert (job.plan, job.attempts, job.memory_ceiling_bytes) == (1, 2, 200 << 20)
        assert "out-of-memory" in live.health_codes()


@go
async def test_a_real_data_limit_stops_a_greedy_worker(tmp_path: Path) -> None:
    """RLIMIT_DATA, the second belt: the worker takes a gigabyte more than its plan."""
    plans = [{"peak_bytes": 64 << 20, "seconds": 0.01, "joules": 0.1}]
    async with running(tmp_path) as live:
        number = await live.submit({**BUNDLE, "plans": plans, "ballast_bytes": 1 << 30})
        job = await live.until_state(number, JobState.BACKOFF)
        assert job.failures == 1
        assert "MemoryError" in await live.ask(live.client.text, f"/v1/jobs/{number}/logs")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA of another process needs Linux")
@go
async def test_a_worker_that_grows_beyond_its_plan_after_a_step_runs_out_of_memory(tmp_path: Path) -> None:
    """Where no group limits it (a Pi as delivered): 300 MiB planned, and no 587 MiB allowed."""
    plans = [{"peak_bytes": 300 << 20, "seconds": 0.01, "joules": 0.1}]
    async with running(tmp_path) as live:
        bundle = {**LONG, "plans": plans, "ballast_bytes": 100 << 20, "faults": {"grow_bytes": 250 << 20}}
        number = await live.submit(bundle)
        await live.until_step(number, 2)
        run = live.context.runners.host._run
        assert run is not None
        if run.worker.group is not None:
            pytest.skip("the kernel limits this worker's memory")
        await live.until(lambda: resource.prlimit(run.worker.pid, resource.RLIMIT_DATA)[0] < 340 << 20, "the belt")
        assert live.job(number).state is JobState.RUNNING
        write_tree(tmp_path / f"state/jobs/{number}/state", {"grow": ""})
        await live.until(lambda: "out-of-memory" in live.health_codes(), "refused: 350 MiB")


@go
async def test_memory_pressure_switches_to_a_smaller_plan_while_running(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        number = await live.submit(LONG)
        await live.until_step(number, 2)
        run = live.context.runners.host._run
        run.switched_at_s -= 1000.0
        live.context.runners.host.adapt(live.context.runners.host._conditions, True)
        await live.until(lambda: live.job(number).plan == 1)
        assert live.job(number).state is JobState.RUNNING
        assert "memory pressure" in live.context.store.history(number)[-1].text


@go
async def test_more_memory_brings_the_larger_plan_and_a_wider_belt(tmp_path: Path) -> None:
    async with running(tmp_path, CONFIG + "[limits.not_in_use]\nmemory = '150M'\n") as live:
        number = await live.submit(LONG)
        await live.until_step(number, 2)
        run = live.context.runners.host._run
        assert run.plan == 1
        assert 0 < resource.prlimit(run.worker.pid, resource.RLIMIT_DATA)[0] <= data_limit(100 << 20)
        (tmp_path / "config.toml").write_text(CONFIG)
        await live.ask(live.client.post, "/v1/reload")
        await live.until(lambda: live.job(number).plan == 0, "the cheaper plan")
        await live.until(lambda: resource.prlimit(run.worker.pid, resource.RLIMIT_DATA)[0] > 100 << 20, "a wider belt")
        assert run.limits.memory_bytes == memory_max(200 << 20)


@go
async def test_a_job_that_does_not_fit_is_left_with_a_health_item(tmp_path: Path) -> None:
    config = CONFIG + "[limits.not_in_use]\nmemory = '50M'\n"
    async with running(tmp_path, config) as live:
        large = await live.submit(BUNDLE, "large")
        small = await live.submit({**BUNDLE, "plans": [{"peak_bytes": 1 << 20, "seconds": 1, "joules": 1}]}, "small")
        await live.until_state(small, JobState.FINISHED)
        assert live.job(large).state is JobState.QUEUED
        assert "job-does-not-fit" in live.health_codes()


@go
async def test_a_broken_bundle_fails_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        path = tmp_path / "broken.json"
        path.write_text("{no json")
        token = (await live.ask(live.client.upload, "/v1/uploads", path))["upload"]
        with pytest.raises(ControlError, match="Expecting property name"):
            await live.ask(live.client.post, "/v1/jobs", name="broken", upload=token)
        assert live.context.store.all() == [] and not list((tmp_path / "state/uploads").iterdir())
        path.write_text(json.dumps(BUNDLE))
        await live.ask(live.client.post, "/v1/jobs", name="broken", bundle=str(path), waits_for_data=True)
        path.write_text("{no json")
        (tmp_path / "state/inbox/broken/a.txt").write_text("0.1\n")
        job = await live.until_state(1, JobState.FAILED)
        assert "bundle cannot be used" in job.reason


@go
async def test_data_that_arrives_is_trained_on_in_rounds(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        number = await live.submit(BUNDLE, "birds", waits_for_data=True, epochs=2)
        assert live.job(number).state is JobState.WAITING_DATA
        (tmp_path / "a.txt").write_text("0.1 0.2 0.3 0.4 0.5\n")
        await live.ask(live.client.upload, "/v1/inbox/birds/a.txt", tmp_path / "a.txt")
        (tmp_path / "state/inbox/birds/unfinished.part").write_text("9 9 9")
        await live.until(lambda: live.job(number).rounds == 1, "first round")
        assert live.job(number).step == 10
        (tmp_path / "state/inbox/birds/b.txt").write_text("0.7 0.8")
        await live.until(lambda: live.job(number).rounds == 2, "second round")
        assert live.job(number).step == 14
        assert live.job(number).state is JobState.WAITING_DATA


@go
async def test_history_is_trimmed_and_scratch_deleted(tmp_path: Path) -> None:
    async with running(tmp_path, CONFIG.replace("[storage]", "[storage]\nkeep_jobs = 1")) as live:
        first, second = await live.submit(BUNDLE, "first"), await live.submit(BUNDLE, "second")
        for number in (first, second):
            await live.until_state(number, JobState.FINISHED)
        await live.until(lambda: live.context.runners.host.job is None)
        await live.daemon.tidy()
        assert [job.id for job in live.context.store.all()] == [second]
        await live.until(lambda: not (tmp_path / f"state/jobs/{first}").exists(), "deleted")
        assert not (tmp_path / f"state/jobs/{second}/state").exists()
        assert live.weights(second)["step"] == BUNDLE["steps"]


@go
async def test_gentle_training_while_somebody_uses_the_device(tmp_path: Path) -> None:
    """In use means a smaller memory limit, and with it the smaller plan."""
    use = "train_while_in_use = true\nbusy_cpu = 0\nbusy_pressure = 0\n"
    config = CONFIG.replace("idle_for = 0\n", f"idle_for = '1h'\n{use}")
    async with running(tmp_path, config + "[limits.in_use]\nmemory = '150M'\n") as live:
        number = await live.submit(BUNDLE)
        job = await live.until_state(number, JobState.FINISHED)
        assert job.plan == 1
        assert "gently" in live.context.admission.decision.codes


@go
async def test_a_deadline_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        number = await live.submit(LONG, deadline_at=time.time() + 5.0)
        await live.until(lambda: "deadline-missed" in live.health_codes())
        assert live.job(number).plan == 0  # the faster one
        await live.ask(live.client.post, f"/v1/jobs/{number}/change", deadline_at=time.time() + 1e6)
        await live.until(lambda: "deadline-missed" not in live.health_codes())


@go
async def test_a_restart_takes_up_the_running_job(tmp_path: Path) -> None:
    bundle = {**BUNDLE, "steps": 40}
    expected = await undisturbed(tmp_path / "plain", bundle)
    async with running(tmp_path) as live:
        number = await live.submit(bundle)
        await live.until_step(number, 12)
    async with running(tmp_path) as live:
        job = await live.until_state(number, JobState.FINISHED)
        assert job.attempts == 2
        assert live.weights(number) == expected


@go
async def test_a_stop_ends_what_migrations_do(tmp_path: Path) -> None:
    async def offer_forever() -> None:
        await asyncio.Event().wait()

    async with running(tmp_path) as live:
        await live.submit(BUNDLE, movable="soonest")
        await live.until(lambda: live.daemon._migrations is not None)
        assert live.daemon._migrations is not None
        offer = live.daemon._migrations._offering = asyncio.create_task(offer_forever())
    assert offer.cancelled()


@go
async def test_two_daemons_on_one_state_directory(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        for runtime in (live.settings.runtime_dir, tmp_path / "other"):
            with pytest.raises(InstanceError, match=f"process {os.getpid()}"):
                await Daemon(replace(live.settings, runtime_dir=runtime), seams()).run()
        assert (await live.ask(live.client.get, "/v1/status"))["state"] == "idle"


@go
async def test_reload_applies_and_a_bad_file_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        (tmp_path / "config.toml").write_text("[when]\nidle_for = 'soon'\n")
        with pytest.raises(ControlError, match=r"config.toml:2: when.idle_for"):
            await live.ask(live.client.post, "/v1/reload")
        assert live.context.config.policy.idle_for_s == 0
        assert "config" in live.health_codes()
        (tmp_path / "config.toml").write_text("[when]\nidle_for = '7min'\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await live.until(lambda: live.context.config.policy.idle_for_s == 420)
        assert "config" not in live.health_codes()


@go
async def test_reload_reaches_a_running_worker_and_the_sensors(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        number = await live.submit(LONG)
        await live.until_step(number, 2)
        assert live.context.runners.host._run.limits.cpu_percent == 100
        write_tree(tmp_path / "proc", {"meminfo": "MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\n"})
        more = f"[limits.not_in_use]\ncpu = 40\n[sensors]\nproc_root = '{tmp_path / 'proc'}'\n"
        (tmp_path / "config.toml").write_text(CONFIG + more)
        answer = await live.ask(live.client.post, "/v1/reload")
        assert answer["after_restart"] == []
        await live.until(lambda: live.context.admission.facts.total_memory_bytes == 4_096_000_000, "other sensors")
        await live.until(lambda: live.context.runners.host._run.limits.cpu_percent == 40, "other limits")
        assert live.job(number).attempts == 1


@go
async def test_reload_names_what_waits_for_a_restart_until_it_is_taken_back(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        (tmp_path / "config.toml").write_text(CONFIG + "[metrics]\nlisten = '127.0.0.1:9477'\n")
        for _ in range(2):
            assert (await live.ask(live.client.post, "/v1/reload"))["after_restart"] == ["metrics.listen"]
        status = await live.ask(live.client.get, "/v1/status")
        assert any("metrics.listen" in item["text"] for item in status["health"] if item["code"] == "restart-needed")
        (tmp_path / "config.toml").write_text(CONFIG)
        assert (await live.ask(live.client.post, "/v1/reload"))["after_restart"] == []
        assert "restart-needed" not in live.health_codes()


@go
async def test_a_worker_without_its_allocator_trains_and_says_so(tmp_path: Path) -> None:
    kinds = {kind: replace(worker, lacks=lambda: "it was built for another machine") for kind, worker in KINDS.items()}
    async with running(tmp_path, kinds=kinds) as live:
        await live.until_state(await live.submit(BUNDLE), JobState.FINISHED)
        status = await live.ask(live.client.get, "/v1/status")
        (item,) = (item for item in status["health"] if item["code"] == "no-allocator")
        assert "built for another machine" in item["text"] and "install" in item["remedy"]


@go
async def test_sensors_that_vanish_and_return(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        live.heat(50)
        number = await live.submit(LONG)
        await live.until_step(number, 2)
        (tmp_path / "sys/class/thermal/thermal_zone0/temp").unlink()
        await live.until(lambda: "sensor" in live.health_codes())
        assert live.context.admission.facts.temperature_c is None
        live.heat(51)
        await live.until(lambda: "sensor" not in live.health_codes())
        assert live.context.admission.facts.temperature_c == 51.0


class JumpingClock:
    """The machine's clocks with a wall clock that a test may set."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time() + self.offset_s

    def uptime_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize("hours", [5.0, -5.0, -24 * 365 * 30.0])
def test_the_clock_jumps_by_hours(tmp_path: Path, hours: float) -> None:
    async def jump(root: Path) -> None:
        clock = JumpingClock()
        async with running(root, clock=clock) as live:
            number = await live.submit({**BUNDLE, "steps": 60}, deadline_at=time.time() + 3600)
            await live.until_step(number, 5)
            clock.offset_s = hours * 3600
            codes = {"clock-jumped"} | ({"clock-unset"} if hours < -1000 else set())
            await live.until(lambda: codes <= live.health_codes(), f"{codes}")
            job = await live.until_state(number, JobState.FINISHED)
            assert (job.attempts, job.step) == (1, 60)

    asyncio.run(asyncio.wait_for(jump(tmp_path), 60.0))


@go
async def test_a_worker_that_ignores_everything_is_stopped_and_killed(tmp_path: Path) -> None:
    config = CONFIG.replace("[storage]", "keep_in_memory = '1h'\n[storage]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "LAST_COMMIT_S", 0.5)  # that ten are given: test_dispatch.py
        await ignores_everything(tmp_path, config)


async def ignores_everything(root: Path, config: str) -> None:
    async with running(root, config) as live:
        number = await live.submit({**LONG, "faults": {"ignore": ["pause", "leave"]}})
        await live.until_step(number, 2)
        pid = live.context.runners.host.pid
        live.heat(90)
        await live.until(lambda: live.context.runners.host.phase is WorkerPhase.PAUSED)
        await live.until(lambda: process_state(pid) == "T", "stopped by the signal")
        await live.ask(live.client.post, "/v1/pause")
        await live.until(lambda: live.context.runners.host.pid is None)
        assert live.job(number).state is JobState.QUEUED
        assert live.job(number).failures == 0
        assert "worker-unresponsive" in live.health_codes()


@go
async def test_a_supervisor_that_dies_takes_its_worker_along(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    supply_tree(tmp_path / "sys")
    words = [str(tmp_path / name) for name in ("state", "run", "config.toml", "sys")]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.agent.live", *words)
    client = ControlClient(tmp_path / "run")
    bundle = tmp_path / "b.json"
    bundle.write_text(json.dumps(LONG))

    await until(client.path.exists)
    token = (await asyncio.to_thread(client.upload, "/v1/uploads", bundle))["upload"]
    await asyncio.to_thread(client.post, "/v1/jobs", name="job", upload=token)
    status = client.get("/v1/status")
    while not status["job"] or status["job"]["step"] < 3:
        status = await asyncio.to_thread(client.get, "/v1/status")
    pid = status["job"]["pid"]
    process.kill()
    await process.wait()
    await until(lambda: process_state(pid) in ("", "Z"))
    async with running(tmp_path) as live:
        await live.until_state(1, JobState.RUNNING)
        assert live.context.runners.host.pid != pid


def test_it_loads_nothing_for_mistakes_calendars_ciphers_and_macs() -> None:
    unused = (
        "_hashlib",
        "calendar",
        "difflib",
        *([] if sys.platform == "darwin" else ["port_agent.energy.sources.macos"]),
    )
    program = f"import sys, port_agent.supervisor.daemon; print(*[name for name in {unused!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
