"""What a device does with a job that comes: refused for every reason there is, damaged, twice, of another device."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from port_agent.jobs.job import Job, JobState
from port_agent.peers.exchange.answers import PeerClient
from port_agent.peers.migration_requests import (
    MIGRATION_ANSWERS,
    MIGRATION_REQUESTS,
    Begin,
    Bring,
    Close,
    Fetch,
    Look,
    MigratedFile,
    MigratedJob,
    MigrationAnswer,
    MigrationState,
    Offer,
    Part,
    Stop,
)
from port_agent.policy.decide import State
from port_agent.supervisor.migration_files import STATE, machine_kind, migrated_files
from port_agent.supervisor.migration_guests import Guests
from port_agent.supervisor.service import BUNDLE_NAME
from tests.agent.live_daemon import BUNDLE
from tests.agent.supervisor.parts import TRAIN, Parts, parts

ATTIC, LOFT = PeerClient("attic", "A" * 8), PeerClient("loft", "L" * 8)
TOKEN = "ab" * 16
OFFER = Offer(token=TOKEN, nbytes=1000, least_bytes=1 << 20, device_kind="cpu")
STATE_BYTES = b"a checkpoint"


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120.0))


class Home:
    """A device that takes jobs, and one that comes."""

    def __init__(self, made: Parts, root: Path) -> None:
        self.made, self.context = made, made.context
        self.context.admission.decision = TRAIN
        self.options(take_jobs=True)
        self.guests = Guests(self.context)
        sources = {BUNDLE_NAME: root / "bundle", f"{STATE}/slot": root / "slot"}
        sources[BUNDLE_NAME].write_text(json.dumps(BUNDLE))
        sources[f"{STATE}/slot"].write_bytes(STATE_BYTES)
        self.contents = [path.read_bytes() for path in sources.values()]
        self.files = migrated_files(sources)
        self.bring = Bring(token=TOKEN, job=MigratedJob(name="birds", step=7, total_steps=30), files=self.files)

    def options(self, **changes: Any) -> None:
        config = self.context.config
        self.context.config = replace(config, options=replace(config.options, **changes))

    async def ask(
        self, request: Offer | Bring | Part | Begin | Look | Stop | Fetch | Close, client: PeerClient = ATTIC
    ) -> MigrationAnswer:
        return MIGRATION_ANSWERS.decode(await self.guests.answer(client, MIGRATION_REQUESTS.encode(request)))

    async def deliver(self) -> MigrationAnswer:
        """Bring all files; returns the last answer."""
        answer = await self.ask(self.bring)
        while answer.state is MigrationState.RECEIVING and answer.file < len(self.files):
            data = self.contents[answer.file][answer.offset :][:100]
            answer = await self.ask(Part(token=TOKEN, file=answer.file, offset=answer.offset, data=data))
        return answer

    def jobs(self) -> list[Job]:
        return self.context.store.all()


@asynccontextmanager
async def home(root: Path) -> AsyncIterator[Home]:
    async with parts(root / "cellar") as made:
        yield Home(made, root)


def test_refused_for_every_reason_there_is(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            assert (await here.ask(OFFER)).state is MigrationState.WELCOME

            async def refusal(offer: Offer = OFFER) -> str:
                answer = await here.ask(offer)
                assert answer.state is MigrationState.REFUSED
                return answer.reason

            here.options(take_jobs=False)
            assert "take_jobs = true" in await refusal()
            here.options(take_jobs=True)
            here.context.admission.decision = replace(TRAIN, state=State.PAUSE, reasons=("on battery 64 %",))
            assert await refusal() == "on battery 64 %"
            here.context.admission.decision = TRAIN
            here.context.admission.facts = replace(here.context.admission.facts, total_memory_bytes=1 << 30)
            assert "grants" in await refusal(Offer(token=TOKEN, nbytes=1, least_bytes=1 << 40, device_kind="cpu"))
            assert "cuda" in await refusal(Offer(token=TOKEN, nbytes=1, least_bytes=1, device_kind="cuda"))
            assert "its disk can give" in await refusal(
                Offer(token=TOKEN, nbytes=1 << 40, least_bytes=1, device_kind="cpu")
            )
            began: dict[str, Any] = {"token": TOKEN, "nbytes": 1, "least_bytes": 1, "device_kind": "cpu"}
            assert "another kind of machine" in await refusal(Offer(**began, machine="other"))
            assert (await here.ask(Offer(**began, machine=machine_kind()))).state is MigrationState.WELCOME
            here.made.add("own")
            assert await refusal() == "it has work of its own"

    run(work())


def test_it_becomes_one_job_however_often_it_is_said(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            assert (await here.deliver()).file == 2
            assert here.jobs() == []
            answers = [await here.ask(Begin(token=TOKEN)) for _ in range(3)]
            assert {answer.state for answer in [*answers, await here.ask(here.bring)]} == {MigrationState.WORKING}
            (job,) = here.jobs()
            assert (job.step, job.spec.guest and job.spec.guest.owner) == (7, "attic")
            directory = here.context.store.job_dir(job.id)
            assert (directory / STATE / "slot").read_bytes() == STATE_BYTES
            assert not any((here.context.settings.state_dir / "moving").iterdir())

    run(work())


def test_what_was_damaged_on_its_way_is_brought_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            await here.deliver()
            (here.context.settings.state_dir / "moving" / TOKEN / "1").write_bytes(STATE_BYTES[::-1])
            assert (await here.ask(Begin(token=TOKEN))).file == 1
            assert here.jobs() == []
            here.guests = Guests(here.context)  # and the agent is started again
            assert (await here.deliver()).file == 2
            assert (await here.ask(Begin(token=TOKEN))).state is MigrationState.WORKING

    run(work())


def test_another_device_knows_nothing_of_it_and_stops_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            await here.deliver()
            await here.ask(Begin(token=TOKEN))
            for request in (
                Look(token=TOKEN),
                Stop(token=TOKEN),
                Close(token=TOKEN),
                Fetch(token=TOKEN, path=BUNDLE_NAME, offset=0),
            ):
                assert (await here.ask(request, LOFT)).state is MigrationState.UNKNOWN
            assert here.jobs()[0].state is JobState.QUEUED

    run(work())


def test_what_was_announced_without_data_holds_nobody_off_for_long(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            theirs = msgspec.structs.replace(here.bring, token="cd" * 16)
            assert (await here.ask(here.bring)).state is MigrationState.RECEIVING
            assert "another device's job" in (await here.ask(theirs, LOFT)).reason
            for request in (here.bring, Part(token=TOKEN, file=0, offset=0, data=b"x"), Begin(token=TOKEN)):
                assert (await here.ask(request, LOFT)).state is MigrationState.UNKNOWN, "it is bound to its owner"
            again = msgspec.structs.replace(here.bring, token="ef" * 16)
            assert (await here.ask(again)).state is MigrationState.RECEIVING, "its owner thinks again"
            folder = here.context.settings.state_dir / "moving" / again.token
            for path in (folder, *folder.iterdir()):
                os.utime(path, (0.0, 0.0))
            assert (await here.ask(theirs, LOFT)).state is MigrationState.RECEIVING and not folder.exists()
            here.guests.drop_unpaired({ATTIC.id})
            assert not (folder.parent / theirs.token).exists()

    run(work())


def test_stopped_it_never_runs_again_and_gives_its_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            await here.deliver()
            await here.ask(Begin(token=TOKEN))
            stopped = await here.ask(Stop(token=TOKEN))
            assert stopped.state is MigrationState.STOPPED and stopped.files == self_files(here)
            assert here.jobs()[0].state is JobState.CANCELLED
            fetched = await here.ask(Fetch(token=TOKEN, path=f"{STATE}/slot", offset=2))
            assert fetched.data == STATE_BYTES[2:]
            for path in (BUNDLE_NAME, "manifest.json", "job.log"):
                assert (await here.ask(Fetch(token=TOKEN, path=path, offset=0))).state is MigrationState.REFUSED
            assert (await here.ask(Close(token=TOKEN))).state is MigrationState.CLOSED
            assert here.jobs() == [] and (await here.ask(Look(token=TOKEN))).state is MigrationState.UNKNOWN

    run(work())


def self_files(here: Home) -> tuple[MigratedFile, ...]:
    return here.files[1:]


@pytest.mark.parametrize("path", ["job.log", "manifest.json", "out.safetensors", "federation/message"])
def test_files_that_are_not_those_of_a_job_are_refused(tmp_path: Path, path: str) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            files = (*here.files, MigratedFile(path, 1, "ab" * 32))
            answer = await here.ask(Bring(token=TOKEN, job=MigratedJob(name="birds"), files=files))
            assert answer.state is MigrationState.REFUSED and "not those of a job" in answer.reason

    run(work())


def test_a_bundle_that_is_none_is_refused_before_it_is_a_job(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            (tmp_path / "bundle").write_text("not a valid bundle")
            here.files = (*migrated_files({BUNDLE_NAME: tmp_path / "bundle"}),)
            here.contents = [b"not a valid bundle"]
            here.bring = Bring(token=TOKEN, job=MigratedJob(name="birds"), files=here.files)
            await here.deliver()
            assert (await here.ask(Begin(token=TOKEN))).state is MigrationState.REFUSED
            assert here.jobs() == []

    run(work())


def test_any_bytes_are_answered(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            for content in (b"", b"\xff" * 100, MIGRATION_ANSWERS.encode(MigrationAnswer(state=MigrationState.DONE))):
                assert (
                    MIGRATION_ANSWERS.decode(await here.guests.answer(ATTIC, content)).state is MigrationState.REFUSED
                )

    run(work())


def test_jobs_of_a_device_that_is_paired_no_more_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with home(tmp_path) as here:
            await here.deliver()
            await here.ask(Begin(token=TOKEN))
            here.guests.drop_unpaired({ATTIC.id})
            assert here.jobs()[0].state is JobState.QUEUED
            here.guests.drop_unpaired(set())
            here.guests.drop_unpaired(set())
            assert here.jobs() == []

    run(work())
