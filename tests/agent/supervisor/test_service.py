"""The verbs on the parts of a supervisor: what each changes, what it refuses with which words, what it wakes."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.control.requests import JobChange
from port_agent.jobs.job import Job, JobKind, JobNotFoundError, JobRequestError, JobSpec, JobState
from port_agent.policy.config import Config
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor import service as service_module
from port_agent.supervisor.job.bundle_check import check_command
from port_agent.supervisor.job.log import JobLog
from port_agent.supervisor.pause import Pause
from port_agent.supervisor.service import BUNDLE_NAME, MeterUnavailableError, Service
from port_agent.system.helper_process import HelperCommand, HelperError
from tests.agent.live_daemon import BUNDLE, go
from tests.agent.supervisor.parts import ANY_TIME, Parts, parts


def put(made: Parts, job: Job, state: JobState, **changes: object) -> Job:
    """Give a job another state, and nobody a reason to look before the next verb."""
    made.context.store.save(replace(job, state=state, **changes))  # type: ignore[arg-type]
    made.context.wake.clear()
    return made.context.store.get(job.id)


@go
async def test_a_submitted_job_owns_its_upload_and_is_on_disk(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service = Service(made.context)
        token = "e" * 32
        with service.uploads() as uploads, uploads.create(token) as stream:
            stream.write(json.dumps(BUNDLE).encode())
        path = service.upload(token)
        assert path is not None and service.upload("f" * 32) is None
        spec = JobSpec("birds", BUNDLE_NAME, waits_for_data=True, deadline_at=made.clock.wall + 60.0)
        detail = await service.submit(spec, path)
        assert (detail.job.state, detail.inbox) == (JobState.WAITING_DATA, tmp_path / "state/inbox/birds")
        assert not path.exists() and json.loads((detail.directory / BUNDLE_NAME).read_text()) == BUNDLE
        assert detail.inbox is not None and detail.inbox.is_dir()
        assert [entry.kind for entry in detail.history] == ["submitted"]
        assert made.context.timers.has("deadline-1") and made.context.wake.is_set()
        with pytest.raises(JobRequestError, match=r"job 1 \(birds\) has this name and has not ended"):
            await service.submit(replace(spec, bundle=str(detail.directory / BUNDLE_NAME)), None)


@go
async def test_a_submission_that_is_sent_again_is_the_same_job(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service, name = Service(made.context), "a" * 32
        spec = JobSpec("birds", str(tmp_path / "bundle.json"), submission=name)
        (tmp_path / "bundle.json").write_text(json.dumps(BUNDLE))
        assert await service.submitted(name) is None and await service.submitted("") is None
        first = asyncio.create_task(service.submit(spec, None))
        await asyncio.sleep(0)
        again = asyncio.create_task(service.submitted(name))  # while the first is being answered
        await asyncio.sleep(0)
        first.cancel()  # whoever asked is gone
        made_there = await again
        assert made_there is not None and made_there.job.spec.name == "birds"
        later = await service.submitted(name)
        assert later is not None and later.job.id == made_there.job.id and len(made.context.store.all()) == 1
        assert await service.submitted("b" * 32) is None


@go
async def test_what_is_refused_is_refused_before_the_bundle_is_sent(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.add("birds")
        service = Service(made.context)
        service.check_submission(JobSpec("bees", BUNDLE_NAME))
        for spec, said in (
            (JobSpec("birds", BUNDLE_NAME), "has this name"),
            (JobSpec("bees", BUNDLE_NAME, epochs=1, steps=1), "not both"),
        ):
            with pytest.raises(JobRequestError, match=said):
                service.check_submission(spec)
        assert len(made.context.store.all()) == 1


@go
async def test_a_damaged_bundle_is_refused_in_the_words_of_its_job(tmp_path: Path) -> None:
    async def damaged(command: HelperCommand) -> bytes:
        raise HelperError(1, f"{command.arguments[0]}: train/0 is damaged near row 3".encode())

    async with parts(tmp_path) as made:
        kind = replace(made.context.seams.kinds[JobKind.TRAIN], check=check_command)
        made.context.seams = replace(made.context.seams, kinds={**made.context.seams.kinds, JobKind.TRAIN: kind})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service_module, "ask_helper", damaged)
            with pytest.raises(JobRequestError, match=r"^the bundle of job0: train/0 is damaged near row 3$"):
                await submitted(Service(made.context), BUNDLE)
        assert list((tmp_path / "state/uploads").iterdir()) == []


async def submitted(service: Service, bundle: dict[str, object], **fields: object) -> Job:
    """Return a job whose bundle arrived as an upload."""
    token = "e" * 32
    with service.uploads() as uploads, uploads.create(token) as stream:
        stream.write(json.dumps(bundle).encode())
    spec = JobSpec(f"job{len(service.jobs(with_all_over=True))}", BUNDLE_NAME, **fields)  # type: ignore[arg-type]
    return (await service.submit(spec, service.upload(token))).job


@go
async def test_a_job_is_promised_what_its_plan_takes_after_those_before_it(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service, wall_s = Service(made.context), made.clock.wall
        made.context.usual_times.look(wall_s - 86400.0, 1.0)
        made.context.usual_times.look(wall_s, 1.0)
        first = (await submitted(service, BUNDLE)).promise
        assert first is not None and (first.plan, first.steps, first.step_s, first.peak_bytes) == (
            0,
            30,
            0.01,
            200 << 20,
        )
        assert first.ends_at == pytest.approx(wall_s + 0.3, abs=1e-3) and first.nights == 1
        second = (await submitted(service, BUNDLE, steps=10)).promise
        assert second is not None and second.ends_at == pytest.approx(wall_s + 0.4, abs=1e-3)
        urgent = (await submitted(service, BUNDLE, priority=1)).promise
        assert urgent is not None and urgent.ends_at == pytest.approx(wall_s + 0.3, abs=1e-3)
        detail = (await service.job("1")).as_json()
        assert detail["promise"]["steps"] == 30 and detail["metered_step_joules"] is None
        made.context.store.flush()
        assert made.context.store.get(1).promise == first


@go
async def test_nothing_is_promised_where_no_plan_fits_and_it_is_said(tmp_path: Path) -> None:
    async with parts(tmp_path, replace(ANY_TIME, not_in_use=ResourceLimits(memory_bytes=50 << 20))) as made:
        job = await submitted(Service(made.context), BUNDLE)
        assert job.promise is None and made.context.health.holds("job-does-not-fit", str(job.id))


@go
async def test_a_job_has_the_deadline_that_its_bundle_was_planned_for(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service, wall_s = Service(made.context), made.clock.wall
        planned = {**BUNDLE, "deadline_at": wall_s + 600.0}
        job = await submitted(service, planned)
        assert job.spec.deadline_at == wall_s + 600.0 and made.context.timers.has(f"deadline-{job.id}")
        assert (await submitted(service, planned, deadline_at=wall_s + 60.0)).spec.deadline_at == wall_s + 60.0
        assert (await submitted(service, {**BUNDLE, "deadline_at": wall_s - 1.0})).spec.deadline_at is None


@go
async def test_the_list_shows_what_goes_on_and_the_newest_that_are_over(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service = Service(made.context)
        for number in range(12):
            put(made, made.add(f"old{number}"), JobState.FINISHED)
        made.add("birds")
        assert [job.name for job in service.jobs(with_all_over=False)] == [f"old{n}" for n in range(2, 12)] + ["birds"]
        assert len(service.jobs(with_all_over=True)) == 13
        for verb in (service.job("dogs"), service.pause_job("99"), service.change_job("99", JobChange())):
            with pytest.raises(JobNotFoundError, match="there is no job"):
                await verb


@go
async def test_a_paused_job_stays_until_it_is_resumed(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service, job = Service(made.context), made.add("birds")
        paused = await service.pause_job("birds")
        assert (paused.state, paused.reason) == ("paused", "paused by you") and made.context.wake.is_set()
        resumed = await service.resume_job("1")
        assert (resumed.state, resumed.reason) == ("queued", "")
        assert [entry.text for entry in made.context.store.history(job.id)] == ["paused", "resumed"]
        made.context.wake.clear()
        assert (await service.resume_job("1")).state == "queued"
        assert len(made.context.store.history(job.id)) == 2, "a job that is not held has nothing to resume"
        put(made, job, JobState.FINISHED)
        with pytest.raises(JobRequestError, match=r"job 1 \(birds\) has ended \(finished\); there is nothing to pause"):
            await service.pause_job("1")


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.CANCELLED])
def test_what_is_done_is_not_resumed(tmp_path: Path, state: JobState) -> None:
    async def resume() -> None:
        async with parts(tmp_path) as made:
            put(made, made.add("birds"), state)
            with pytest.raises(JobRequestError, match=rf"job 1 \(birds\) is {state.name.lower()}; submit it again"):
                await Service(made.context).resume_job("1")

    asyncio.run(resume())


@go
async def test_a_job_that_was_given_up_begins_anew(tmp_path: Path) -> None:
    """Its failures are forgotten, its unfinished round is taken apart, and the health item goes."""
    async with parts(tmp_path) as made:
        context, job = made.context, made.add("birds", waits_for_data=True)
        failed = put(made, job, JobState.FAILED, failures=6, rounds=2, reason="given up", finished_at=5.0)
        context.health.report("job-given-up", 0.0, 0.0, key="1", job=job.label, id=1, reason="given up")
        (context.store.job_dir(1) / "rounds/3").mkdir(parents=True)
        resumed = await Service(context).resume_job("1")
        assert resumed.state == "waiting_data" and not context.health.holds("job-given-up", "1")
        assert not (context.store.job_dir(1) / "rounds/3").exists()
        assert context.store.get(1) == replace(
            failed, state=JobState.WAITING_DATA, failures=0, reason="", finished_at=None
        )


@go
async def test_a_pause_in_the_middle_of_a_round_goes_on_with_that_round(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        job = made.add("birds", waits_for_data=True)
        put(made, job, JobState.PAUSED, rounds=2)
        (made.context.store.job_dir(1) / "rounds/3").mkdir(parents=True)
        assert (await Service(made.context).resume_job("1")).state == "queued"
        assert (made.context.store.job_dir(1) / "rounds/3").is_dir()


@go
async def test_a_cancelled_job_leaves_no_condition_and_no_deadline_behind(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context, service = made.context, Service(made.context)
        deadline, bundle = made.clock.wall + 60.0, tmp_path / "bundle.json"
        bundle.write_text(json.dumps(BUNDLE))
        for name in ("birds", "cats"):
            await service.submit(JobSpec(name, str(bundle), deadline_at=deadline), None)
        codes = ("job-does-not-fit", "job-failing", "deadline-missed")
        for key in ("1", "2"):
            for code in codes:
                context.health.report(code, 0.0, 0.0, key=key)
        cancelled = await service.cancel_job("birds")
        assert (cancelled.state, cancelled.reason) == ("cancelled", "cancelled by you")
        assert context.store.get(1).finished_at == made.clock.wall
        assert not any(context.health.holds(code, "1") for code in codes)
        assert all(context.health.holds(code, "2") for code in codes)
        assert not context.timers.has("deadline-1") and context.timers.has("deadline-2")
        with pytest.raises(JobRequestError, match=r"job 1 \(birds\) has already ended \(cancelled\)"):
            await service.cancel_job("1")


@go
async def test_a_change_of_the_deadline_moves_the_timer(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context, service = made.context, Service(made.context)
        made.add("birds")
        at = made.clock.wall + 60.0
        assert (await service.change_job("1", JobChange(deadline_at=at))).deadline_at == at
        assert context.timers.has("deadline-1")
        changed = await service.change_job("1", JobChange(priority=7))
        assert (changed.priority, changed.deadline_at) == (7, at) and context.timers.has("deadline-1")
        assert (await service.change_job("1", JobChange(deadline_at=None))).deadline_at is None
        assert not context.timers.has("deadline-1")
        assert [entry.text for entry in context.store.history(1)][1] == "priority is now 7"


@go
async def test_a_pause_of_everything_is_remembered_across_restarts(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service = Service(made.context)
        assert await service.pause_all(90.0) == made.clock.wall + 90.0 == made.context.pause.until()
        assert await service.pause_all(None) is None
        assert made.context.pause.until() == math.inf and made.context.wake.is_set()
        assert Pause(tmp_path / "state", made.clock).until() == math.inf
        await service.resume_all()
        assert made.context.pause.until() is None and Pause(tmp_path / "state", made.clock).until() is None


@go
async def test_what_a_job_has_not_is_said(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service, job = Service(made.context), made.add("birds")
        with pytest.raises(JobRequestError, match=r"job 1 \(birds\) has no result yet \(queued\)"):
            await service.result("birds")
        put(made, job, JobState.FINISHED, result=str(tmp_path / "gone.safetensors"))
        with pytest.raises(JobRequestError, match=r"has no result yet \(finished\)"):
            await service.result("birds")
        (tmp_path / "gone.safetensors").write_text("weights")
        assert (await service.result("birds")).read_text() == "weights"
        with pytest.raises(JobRequestError, match="takes no data from an inbox; submit it with --inbox"):
            service.inbox("birds")
        with pytest.raises(MeterUnavailableError, match="could not be opened"):
            await service.energy_report({})


async def next_chunk(chunks: AsyncIterator[str]) -> str:
    """Return what a followed log shows next."""
    return await asyncio.wait_for(anext(chunks), 60.0)


def test_a_followed_log_ends_with_the_job_or_when_it_is_tidied_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_FOLLOW_POLL_S", 0.0)

    async def follow() -> None:
        async with parts(tmp_path) as made:
            service, store = Service(made.context), made.context.store
            for ends_by_itself in (True, False):
                job = made.add("birds")
                log = JobLog(store.job_dir(job.id), 1 << 20)
                for text in ("one", "two"):
                    log.note(text, 0.0)
                chunks = service.follow_log("birds", 1)
                assert (await next_chunk(chunks)).endswith("agent: two\n")
                log.note("three", 0.0)
                assert (await next_chunk(chunks)).endswith("agent: three\n")
                if ends_by_itself:
                    log.note("the end", 0.0)
                    put(made, job, JobState.FINISHED)
                    assert (await next_chunk(chunks)).endswith("agent: the end\n"), "what came before the end is shown"
                else:
                    store.forget(job.id)
                with pytest.raises(StopAsyncIteration):
                    await next_chunk(chunks)

    asyncio.run(follow())


@go
async def test_a_reload_names_what_waits_for_a_restart(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.context.config = replace(made.context.config, options=replace(Config().options, metrics_listen=("::1", 9)))
        in_force = Service(made.context).reload()
        assert len(made.reloads) == 1 and in_force.after_restart == ("metrics.listen",)


@go
async def test_the_supervisors_own_view(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        service = Service(made.context)
        made.context.health.report("no-meter", 0.0, 0.0, reason="no source")
        assert [item.code for item in service.health()] == ["no-meter"]
        assert service.peer_rows() is None and service.peers()["discover"] is False
        made.add("birds")
        text = service.metrics()
        assert 'port_agent_state{state="waiting"} 1.0' in text and "joules" not in text
