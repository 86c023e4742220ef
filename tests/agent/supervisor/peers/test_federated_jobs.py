"""What a device does for the leader of a federation: what comes twice, damaged, too large or of
another; restarts; the policy.
"""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from port_agent.federate.orders import ARRAYS, CONFIG, FOLDER, MODEL_FILE, RESULT_FILE, START_FILE
from port_agent.federate.privacy import PrivacyLedger
from port_agent.federate.tensors import federated_tensors
from port_agent.federate.wire import array_record, message_bytes, read_message
from port_agent.jobs.job import FederationTerms, JobKind, JobRequestError, JobSpec, JobState
from port_agent.jobs.store import JobStore
from port_agent.peers.exchange.answers import PeerClient
from port_agent.peers.federation_requests import (
    Invitation,
    MembershipRequest,
    MessageChunk,
    ReplyRequest,
    RoundEnd,
    TaskAnswer,
    TaskState,
)
from port_agent.supervisor.peers import federated_jobs
from port_agent.supervisor.peers.federated_jobs import THIS_DEVICE, FederatedJobs
from port_agent.supervisor.peers.peer_answers import FederatedContext
from tests.agent.federate.jobs import adapter_file, gestures_bundle, gestures_job
from tests.agent.live_daemon import until

pytestmark = pytest.mark.process

NAME, RUN, OTHER_RUN = "gestures", "ab" * 16, "cd" * 16
LED = FederationTerms(leader="AT-TIC", leader_name="attic")
ATTIC, CELLAR = PeerClient("attic", "AT-TIC"), PeerClient("cellar", "CEL-LAR")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gestures_bundle(tmp_path_factory.mktemp("bundle"), 0)


class Home:
    """A device with one federated job, and a message for it."""

    def __init__(self, root: Path, bundle: Path, kind: JobKind, verb: str, terms: FederationTerms) -> None:
        self.store, self.objection = JobStore(root), ""
        self.audits: list[str] = []
        self.woken, self.lease_s = 0, 3600.0
        spec = JobSpec(NAME, "bundle.port", kind, federated=True, terms=terms)

        def prepare(folder: Path) -> None:
            shutil.copy(bundle, folder / "bundle.port")

        self.store.add(spec, 0.0, prepare)
        self.tensors = federated_tensors(bundle)
        self.folder = self.store.job_dir(1) / FOLDER
        self.jobs = self.restarted()
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
        records = RecordDict({ARRAYS: array_record(self.tensors.initial()), CONFIG: ConfigRecord({"server-round": 1})})
        self.message = message_bytes(Message(records, 5, verb))
        self.hash = hashlib.sha256(self.message).hexdigest()

    def restarted(self) -> FederatedJobs:
        """Return what an agent has that was just started."""
        conditions = FederatedContext(lambda: self.objection, lambda job: None, self._wake)
        self.jobs = FederatedJobs(self.store.job_dir(1).parent, self.store, conditions, self.audits.append)
        return self.jobs

    def _wake(self) -> None:
        self.woken += 1

    def part(self, begin: int, end: int | None = None, run: str = RUN, message: bytes | None = None) -> MessageChunk:
        whole = message or self.message
        digest, tensors = hashlib.sha256(whole).hexdigest(), self.tensors.fingerprint
        return MessageChunk(
            job=NAME,
            run=run,
            message=digest,
            tensors=tensors,
            total=len(whole),
            offset=begin,
            data=whole[begin:end],
            number=3,
            lease_s=self.lease_s,
        )

    async def ask(self, request: Invitation | MessageChunk | ReplyRequest | RoundEnd) -> TaskAnswer:
        return await self.jobs.respond(ATTIC, request)

    async def reply(self, offset: int = 0) -> TaskAnswer:
        return await self.ask(ReplyRequest(job=NAME, run=RUN, message=self.hash, offset=offset))

    async def answered(self) -> TaskAnswer:
        """Ask for the reply until it is there, as a leader does."""
        async with asyncio.timeout(60.0):
            while True:
                answer = await self.reply()
                if answer.state is not TaskState.WORKING:
                    return answer
                await asyncio.sleep(0.05)

    async def begun(self) -> None:
        """Deliver the message, and wait until the job should train."""
        assert (await self.ask(self.part(0))).state is TaskState.WORKING
        await until(lambda: self.store.get(1).state is JobState.QUEUED)

    def trained(self) -> None:
        """Do what the runner does with a job that is in line."""
        arrays = self.tensors.read(self.folder / START_FILE)
        self.tensors.write(self.folder / RESULT_FILE, {name: array + 1 for name, array in arrays.items()})
        self.store.save(replace(self.store.get(1), state=JobState.WAITING_DATA, loss=0.5))


@asynccontextmanager
async def home(
    root: Path, bundle: Path, kind: JobKind = JobKind.TRAIN, verb: str = "train", terms: FederationTerms = LED
) -> AsyncIterator[Home]:
    made = Home(root, bundle, kind, verb, terms)
    try:
        yield made
    finally:
        await made.jobs.stop()
        made.store.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 120.0))


def test_a_message_in_chunks_is_trained_and_answered_across_restarts(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            assert (await made.ask(made.part(100))).state is TaskState.UNKNOWN, "it must begin at the beginning"
            assert (await made.ask(made.part(0, 100))).size == 100
            assert (await made.ask(made.part(0, 100))).size == 100, "what comes twice counts once"
            made.restarted()
            assert (await made.ask(made.part(50))).size == 100, "a gap or an overlap is asked for again"
            assert (await made.reply()).state is TaskState.RECEIVING
            assert (await made.ask(made.part(100))).state is TaskState.WORKING
            await until(lambda: made.store.get(1).state is JobState.QUEUED)
            assert made.woken == 1 and "attic leads" in made.store.get(1).reason
            made.restarted()
            assert (await made.reply()).state is TaskState.WORKING
            made.trained()
            answer = await made.answered()
            whole = answer.data
            assert answer.size == len(whole) and (await made.reply(offset=len(whole))).data == b""
            reply = read_message(whole)
            assert reply.metadata.src_node_id == 5 and reply.content["metrics"]["loss"] == 0.5
            assert (await made.ask(made.part(0))).state is TaskState.WORKING, (
                "the same message again is not trained again"
            )
            assert (await made.reply()).data == whole

    run(work)


def test_a_job_with_data_of_its_own_counts_that_and_spends_its_privacy(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            folder = made.store.job_dir(1) / "data"
            folder.mkdir()
            np.savez(folder / "mine.npz", *(column.numpy()[:7] for column in gestures_job(1, 3).data))
            job = made.store.get(1)
            made.store.save(replace(job, spec=replace(job.spec, data="data")))
            of = await made.jobs.tensors_of(made.store.get(1))
            await made.begun()
            made.trained()
            reply = read_message((await made.answered()).data)
            assert reply.content["metrics"]["num-examples"] == of.samples == 7
            got = "attic: round 3 of job 1 (gestures) received this device's weights, unclipped, visible to the leader"
            assert made.audits[-1] == got
            assert of.data != made.tensors.data
            assert PrivacyLedger(tmp_path / "jobs", of.data).spent().bare == 1

    run(work)


def test_who_takes_part_is_for_the_device_to_say(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            invitation = Invitation(job=NAME, run=RUN, tensors=made.tensors.fingerprint)
            assert (await made.ask(invitation)).state is TaskState.READY
            assert "no federated job other" in (await made.ask(replace_job(invitation, "other"))).reason
            other = Invitation(job=NAME, run=RUN, tensors="0" * 64)
            assert "other tensors" in (await made.ask(other)).reason
            made.objection = "not charging"
            for request in (invitation, made.part(0)):
                answer = await made.ask(request)
                assert (answer.state, answer.reason) == (TaskState.REFUSED, "not charging")
            made.objection = ""
            made.store.save(replace(made.store.get(1), state=JobState.PAUSED))
            assert "its job is paused" in (await made.ask(invitation)).reason
            assert not made.folder.exists()

    run(work)


def test_only_the_leader_that_its_owner_named_commands_a_job(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            invitation = Invitation(job=NAME, run=RUN, tensors=made.tensors.fingerprint)
            for request in (invitation, made.part(0), RoundEnd(job=NAME, run=RUN, message=made.hash)):
                answer = await made.jobs.respond(CELLAR, request)
                assert answer.state is TaskState.REFUSED and "this device may lead" in answer.reason
            assert not made.folder.exists()
            refused = "cellar asked to lead rounds of job 1 (gestures) and was refused: its leader is attic"
            assert made.audits == [refused], "once"
            for leader in (ATTIC, THIS_DEVICE):
                assert (await made.jobs.respond(leader, invitation)).state is TaskState.READY
            await made.begun()
            assert made.audits[1:] == ["attic leads rounds of job 1 (gestures) from now on"]
            knock = await made.jobs.respond(CELLAR, made.part(0, message=made.message + b" "))
            assert knock.state is TaskState.REFUSED and (await made.reply()).state is TaskState.WORKING

    run(work)


def test_a_jobs_name_is_told_to_who_may_lead_it(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            assert (await made.jobs.respond(ATTIC, MembershipRequest())).jobs == (NAME,)
            assert (await made.jobs.respond(CELLAR, MembershipRequest())).jobs == ()
            invitation = Invitation(job=NAME, run=RUN, tensors=made.tensors.fingerprint)
            there = await made.jobs.respond(CELLAR, invitation)
            assert there.reason == (await made.jobs.respond(CELLAR, replace_job(invitation, "x"))).reason.replace(
                " x ", f" {NAME} "
            )

    run(work)


def test_a_leader_that_is_gone_frees_its_members_after_the_rounds_time(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            await made.begun()
            shown = made.jobs.memberships()
            assert [(one["leader"], one["round"]) for one in shown] == [("attic", 3)] and "to train" in str(
                shown[0]["waits"]
            )
            made.lease_s = 0.01
            assert (await made.ask(made.part(0))).state is TaskState.WORKING
            await until(lambda: made.store.get(1).state is JobState.WAITING_DATA)
            made.lease_s = 3600.0
            assert made.audits[-1] == "attic was silent for a whole round: job 1 (gestures) is free"
            other = made.part(0, 10, run=OTHER_RUN, message=made.message + b" ")
            assert (await made.ask(other)).state is TaskState.RECEIVING
            assert made.jobs.memberships()[0]["waits"] == "for attic to send the round's initial weights"

    run(work)


def test_a_leader_that_is_heard_of_keeps_its_members(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            await made.begun()
            first = made.jobs._leases[1].when()
            assert (await made.reply()).state is TaskState.WORKING and made.jobs._leases[1].when() > first
            await made.ask(RoundEnd(job=NAME, run=RUN, message=made.hash))
            assert made.jobs._leases == {}

    run(work)


def test_after_a_restart_its_leader_has_minutes(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(federated_jobs, "_RESTART_LEASE_S", 0.01)
        async with home(tmp_path, bundle) as made:
            await made.begun()
            made.restarted().go_on()
            await until(lambda: made.store.get(1).state is JobState.WAITING_DATA)

    run(work)


def test_who_leaves_or_unpairs_is_free_at_once(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            await made.begun()
            await made.jobs.free_from(CELLAR.id)
            assert made.store.get(1).state is JobState.QUEUED
            await made.jobs.free_from(ATTIC.id)
            assert made.store.get(1).state is JobState.WAITING_DATA and "attic is unpaired" in made.audits[-1]
            assert (await made.ask(made.part(0))).state is TaskState.WORKING, "paired again, it may lead"
            left = await made.jobs.leave(NAME)
            assert left.reason == "waiting for a leader" and "left the federation that attic leads" in made.audits[-1]
            assert (await made.ask(made.part(0))).state is TaskState.REFUSED
            with pytest.raises(JobRequestError, match="no other device may lead job 1"):
                await made.jobs.leave(NAME)

    run(work)


def test_without_a_leader_only_this_device_leads(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle, terms=FederationTerms()) as made:
            invitation = Invitation(job=NAME, run=RUN, tensors=made.tensors.fingerprint)
            assert (await made.ask(invitation)).state is TaskState.REFUSED
            assert "submit it with --leader to allow one" in made.audits[0]
            assert (await made.jobs.respond(THIS_DEVICE, invitation)).state is TaskState.READY

    run(work)


@pytest.mark.parametrize(
    ("terms", "refusal"),
    [
        (replace(LED, require_secure=True), "contributions to masked sums; lead with --secure"),
        (replace(LED, require_clip=1.5), "clipped to a norm of 1.5 or less; lead with --clip"),
    ],
)
def test_rounds_that_its_owner_does_not_allow_get_nothing_of_a_device(
    tmp_path: Path, bundle: Path, terms: FederationTerms, refusal: str
) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle, terms=terms) as made:
            assert (await made.ask(made.part(0))).state is TaskState.WORKING
            reply = read_message((await made.answered()).data)
            assert (
                made.audits[-1].startswith("attic: round 3 of job 1 (gestures) was refused: ")
                and refusal in made.audits[-1]
            )
            assert refusal in str(reply.error.reason) and "Error:" not in str(reply.error.reason)
            assert made.store.get(1).state is JobState.WAITING_DATA
            assert "this device refused this one: " in str(made.jobs.memberships()[0]["waits"])
            await made.ask(RoundEnd(job=NAME, run=RUN, message=made.hash))
            assert refusal in str(made.jobs.memberships()[0]["waits"]), "also when nobody waits for it any longer"

    run(work)


def test_a_job_trains_no_more_rounds_than_its_owner_allows(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle, terms=replace(LED, max_rounds=1)) as made:
            await made.begun()
            made.trained()
            assert (await made.answered()).state is TaskState.DONE
            records = RecordDict(
                {ARRAYS: array_record(made.tensors.initial()), CONFIG: ConfigRecord({"server-round": 2})}
            )
            second = message_bytes(Message(records, 5, "train"))
            made.hash = hashlib.sha256(second).hexdigest()
            assert (await made.ask(made.part(0, message=second))).state is TaskState.WORKING
            answer = await made.answered()
            assert answer.state is TaskState.FAILED and "allows 1 rounds, which are done" in answer.reason
            assert "trains no further round" in made.audits[-1]

    run(work)


def test_a_damaged_record_of_rounds_does_not_begin_at_zero(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle, terms=replace(LED, max_rounds=1)) as made:
            await made.begun()
            made.trained()
            assert (await made.answered()).state is TaskState.DONE
            record = made.folder / "task.json"
            record.write_bytes(record.read_bytes()[:-1])
            answer = await made.restarted().respond(ATTIC, made.part(0))
            assert answer.state is TaskState.REFUSED and "the record of its rounds is damaged" in answer.reason

    run(work)


def test_one_federation_at_a_time_and_messages_of_its_size(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            huge = MessageChunk(
                job=NAME,
                run=RUN,
                message=made.hash,
                tensors=made.tensors.fingerprint,
                total=1 << 31,
                offset=0,
                data=b"x",
                number=1,
                lease_s=60.0,
            )
            assert "the message has 2.0 GiB, more than" in (await made.ask(huge)).reason
            await made.begun()
            other = made.part(0, run=OTHER_RUN, message=made.message + b" ")
            assert "trains for the federation that attic leads" in (await made.ask(other)).reason
            await made.ask(RoundEnd(job=NAME, run=RUN, message=made.hash))
            assert made.store.get(1).state is JobState.WAITING_DATA and "nobody waits" in made.audits[-1]
            assert (await made.ask(made.part(0, 10, run=OTHER_RUN))).state is TaskState.RECEIVING

    run(work)


def test_what_is_damaged_on_its_way_is_brought_again(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            part = made.part(0)
            flipped = MessageChunk(
                job=NAME,
                run=RUN,
                message=part.message,
                tensors=part.tensors,
                total=part.total,
                offset=0,
                data=part.data[:-1] + bytes([part.data[-1] ^ 1]),
                number=3,
                lease_s=60.0,
            )
            answer = await made.ask(flipped)
            assert answer.state is TaskState.UNKNOWN and "damaged in transit" in answer.reason
            assert (await made.ask(part)).state is TaskState.WORKING

    run(work)


def test_a_message_does_not_grow_on_its_way(tmp_path: Path, bundle: Path) -> None:
    """The length that was announced first is the one that was held against the job's size and the disk's room."""

    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            assert (await made.ask(made.part(0, 100))).size == 100
            longer = msgspec.structs.replace(made.part(100), total=1 << 31)
            assert (await made.ask(longer)).state is TaskState.UNKNOWN
            assert (await made.ask(msgspec.structs.replace(longer, offset=0))).state is TaskState.REFUSED
            assert (await made.ask(made.part(100))).state is TaskState.WORKING

    run(work)


def test_a_message_that_is_none_fails_and_is_told(tmp_path: Path, bundle: Path) -> None:
    async def work() -> None:
        async with home(tmp_path, bundle) as made:
            junk = b"\xff" * 300
            made.hash = hashlib.sha256(junk).hexdigest()
            assert (await made.ask(made.part(0, message=junk))).state is TaskState.WORKING
            answer = await made.answered()
            assert answer.state is TaskState.FAILED and "not a Flower message" in answer.reason
            assert made.store.get(1).state is JobState.WAITING_DATA and "failed" in made.audits[-1]
            assert b"not a request of a federation" in await made.jobs.answer(ATTIC, b"junk")

    run(work)


def test_an_averaged_adapter_waits_in_line_for_the_worker_of_its_fine_tuning(tmp_path: Path) -> None:
    async def work() -> None:
        adapter = adapter_file(tmp_path / "finetune.port")
        async with home(tmp_path / "home", adapter, JobKind.FINETUNE, "evaluate") as made:
            assert (await made.ask(made.part(0))).state is TaskState.WORKING
            reply = read_message((await made.answered()).data)
            assert reply.content["metrics"]["num-examples"] == 9
            job = made.store.get(1)
            assert job.state is JobState.QUEUED and job.reason == "makes its adapter from the average"
            kept, begun = made.tensors.read(made.folder / MODEL_FILE), made.tensors.initial()
            assert made.woken == 1 and all((kept[name] == begun[name]).all() for name in begun)
            assert (await made.ask(made.part(0, 10, run=OTHER_RUN))).state is TaskState.WORKING, "the same message"
            other = made.part(0, 10, run=OTHER_RUN, message=made.message + b" ")
            assert (await made.ask(other)).state is TaskState.RECEIVING, "another federation comes first"
            assert made.store.get(1).state is JobState.WAITING_DATA and (made.folder / MODEL_FILE).exists()

    run(work)


def replace_job(invitation: Invitation, job: str) -> Invitation:
    return Invitation(job=job, run=invitation.run, tensors=invitation.tensors)
