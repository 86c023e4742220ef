"""This device's part in federations: a job that was submitted for them trains when their leader
asks, as the policy allows.

Each such job has one message at a time, in the folder `federation` of its directory. Its progress is determined by
the files there, so training continues after a restart of the agent or of the device. Flower runs in a short process
before and after training.
"""

import asyncio
import contextlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from port_agent.federate.orders import (
    CONTEXT_FILE,
    FOLDER,
    MESSAGE_FILE,
    MODEL_FILE,
    REPLY_FILE,
    RESULT_FILE,
    START_FILE,
    ClientEnded,
    ClientOrder,
    TensorsOf,
    has_round,
)
from port_agent.federate.privacy import PrivacyLedger
from port_agent.jobs.job import Job, JobKind, JobRequestError, JobState
from port_agent.jobs.store import JobStore
from port_agent.peers.decoding import REASON_LIMIT, public_reason
from port_agent.peers.exchange.answers import PeerClient
from port_agent.peers.federation_requests import (
    FEDERATION_ANSWERS,
    FEDERATION_REQUESTS,
    MAX_MEMBERSHIPS,
    FederationMessageError,
    Invitation,
    JobRequest,
    MembershipRequest,
    MessageChunk,
    ReplyRequest,
    Request,
    RoundEnd,
    TaskAnswer,
    TaskState,
)
from port_agent.peers.fleet.paired import OWN_NAME
from port_agent.peers.transfer import IncomingFile, file_bytes, file_hash, read_chunk
from port_agent.supervisor.job.worker_kinds import bundle_path
from port_agent.supervisor.peers.peer_answers import FederatedContext
from port_agent.system.atomic_file import write_atomically
from port_agent.system.checksum import file_checksum
from port_agent.system.helper_process import HelperCommand, HelperError, ask_helper
from port_agent.system.python_process import one_thread_environment
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes

CLIENT_MODULE, TENSORS_MODULE = "port_agent.federate.client", "port_agent.federate.tensors"
CLIENT_BYTES = 512 << 20
"""Bytes of data that a client may hold besides ten copies of what it federates: masking holds several
64-bit copies of a change.
"""
_COPIES = 10
_CLIENT_S = 600.0
"""Seconds for a client, which reads and writes several copies of the weights; a slow card writes 10 MB/s."""
_TASK_FILE = "task.json"
_RESTART_LEASE_S = 300.0
"""Seconds after a start of this device in which its leader can connect again."""
_LEAVE_S = 20.0
"""Seconds in which a worker that must leave is gone."""
THIS_DEVICE = PeerClient(OWN_NAME, "")
"""Stands for the leader of a federation that this device leads."""
NO_FLOWER = "Flower is not installed: pip install 'port-agent[federate]'"


def has_flower() -> bool:
    """Return whether this device can take part in federations, by finding Flower without loading it."""
    return importlib.util.find_spec("flwr") is not None


def flower_environment() -> dict[str, str]:
    """Return the environment of Flower's processes, with telemetry off."""
    return {**one_thread_environment(), "FLWR_TELEMETRY_ENABLED": "0"}


class _Task(msgspec.Struct, frozen=True):
    """The message on which a job works."""

    run: str
    message: str
    total: int
    leader: str
    """Name of the device that leads."""
    leader_id: str
    """Id of the leader; "": this device."""
    number: int
    """Number of the round."""
    lease_s: float
    rounds: int = 0
    """Number of rounds that the job has trained."""
    failed: str = ""
    refused: str = ""
    """Why the reply contains nothing from this device."""
    over: bool = False
    """Whether nobody waits for the reply any more."""


class FederatedJobs:
    """Answers leaders of federations for the jobs of this device; `audit` receives events."""

    def __init__(
        self, state_dir: Path, store: JobStore, conditions: FederatedContext, audit: Callable[[str], None]
    ) -> None:
        self._state_dir, self._store, self._context, self._audit = state_dir, store, conditions, audit
        self._tensors: dict[int, TensorsOf] = {}
        self._clients: dict[int, asyncio.Task[None]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._leases: dict[int, asyncio.TimerHandle] = {}
        """Timers that free a job whose leader is no longer in contact."""
        self._expiring: set[asyncio.Task[None]] = set()
        self._refused_leaders: set[tuple[int, str]] = set()

    def go_on(self) -> None:
        """Resume work for leaders after a restart; a leader that does not connect soon is given up.

        It needs a running event loop.
        """
        for job in self._alive():
            task = self._task(job)
            if task is not None and not task.over:
                self._hold(job, min(task.lease_s, _RESTART_LEASE_S))

    def memberships(self) -> list[dict[str, object]]:
        """Return the jobs that other devices lead or may lead, as plain values."""
        return [self.membership(job) for job in self._alive() if job.spec.terms.leader or self._task(job)]

    def membership(self, job: Job) -> dict[str, object]:
        """Return a job's leader, its round, and what it waits for, as plain values."""
        task = self._task(job)
        is_led = task is not None and not task.over
        rests = "for its leader to begin a round"
        if task is not None and task.refused:
            rests += f"; this device refused the last one: {task.refused}"
        return {
            "job": job.id,
            "name": job.spec.name,
            "leader": task.leader if task is not None and is_led else job.spec.terms.leader_name or THIS_DEVICE.name,
            "round": task.number if task is not None and is_led else None,
            "trained_rounds": task.rounds if task is not None else 0,
            "privacy": self._privacy(job),
            "waits": self._waits(job, task) if task is not None and is_led else rests,
        }

    def _privacy(self, job: Job) -> dict[str, object] | None:
        """Return what a job's data has spent of its privacy budget, as plain values; None if not known yet."""
        tensors = self._tensors.get(job.id)
        if tensors is None:
            return None
        try:
            spent = PrivacyLedger(self._state_dir, tensors.data).spent()
        except (OSError, msgspec.MsgspecError):
            return None
        epsilon = None if spent.bare else spent.epsilon
        return {"epsilon": epsilon, "rounds": spent.rounds, "bare": spent.bare, "budget": job.spec.terms.epsilon_budget}

    def _waits(self, job: Job, task: _Task) -> str:
        """Return what a round of a job waits for."""
        folder = self._folder(job)
        if task.failed:
            return f"for the next round; this one failed: {task.failed}"
        if job.id in self._clients:
            return "for Flower's process here, which takes seconds"
        if (folder / REPLY_FILE).exists() and task.refused:
            return f"for the next round; this device refused this one: {task.refused}"
        if (folder / REPLY_FILE).exists():
            return f"for {task.leader} and the other devices: its part is done"
        if not IncomingFile(folder / MESSAGE_FILE, task.total).is_whole:
            return f"for {task.leader} to send the round's initial weights"
        if job.state is JobState.RUNNING:
            return f"for its training (step {job.step})"
        if not has_round(folder):
            return f"for {task.leader} to ask for its reply"
        return f"to train: {self._context.objection() or job.reason}"

    async def leave(self, name: str) -> Job:
        """Stop working for a job's leader, which may then no longer lead it; return the job.

        Raises JobRequestError.
        """
        job = self._store.find(name)
        if not job.spec.federated or not job.spec.terms.leader:
            raise JobRequestError(f"no other device may lead job {job.label}", job.id)
        leader = job.spec.terms.leader_name
        await self._free(job, f"this device left the federation that {leader} leads")
        now = self._store.get(job.id)
        alone = replace(now.spec.terms, leader="", leader_name="")
        self._store.save(replace(now, spec=replace(now.spec, terms=alone), reason="waiting for a leader"))
        return self._store.get(job.id)

    async def free_from(self, leader_id: str) -> None:
        """End all work for a device that is no longer trusted."""
        for job in self._alive():
            task = self._task(job)
            if task is not None and task.leader_id == leader_id:
                await self._free(job, f"{task.leader} is unpaired: it no longer leads job {job.label}")

    async def answer(self, leader: PeerClient, content: bytes) -> bytes:
        """Return the answer to a request of a paired device, whatever the request contains."""
        try:
            request = FEDERATION_REQUESTS.decode(content)
        except FederationMessageError as error:
            self._audit(f"{leader.name}: {error}")
            return FEDERATION_ANSWERS.encode(_refused(str(error)))
        return FEDERATION_ANSWERS.encode(await self.respond(leader, request))

    async def respond(self, leader: PeerClient, request: Request) -> TaskAnswer:
        """Return the answer to a request of the device that the job's owner named, or of this one (`THIS_DEVICE`)."""
        if isinstance(request, MembershipRequest):
            jobs = [job.spec.name for job in self._alive() if job.spec.terms.leader == leader.id]
            return TaskAnswer(state=TaskState.READY, jobs=tuple(jobs[:MAX_MEMBERSHIPS]))
        job = next((job for job in self._alive() if job.spec.name == request.job), None)
        may_lead = job is not None and leader.id in ("", job.spec.terms.leader)
        if job is None or not may_lead:
            if job is not None:
                self._refuse(job, leader)
            return _refused(f"it has no federated job {request.job} that this device may lead (submit --leader there)")
        return await self._respond(job, leader, request)

    async def _respond(self, job: Job, leader: PeerClient, request: JobRequest) -> TaskAnswer:
        async with self._locks.setdefault(job.id, asyncio.Lock()):
            try:
                match request:
                    case Invitation():
                        return await self._invited(job, request)
                    case MessageChunk():
                        return await self._take(job, leader, request)
                    case ReplyRequest():
                        return await self._reply(job, request)
                    case RoundEnd():
                        return await self._end(job, request)
            except (OSError, PortError) as error:
                return TaskAnswer(state=TaskState.FAILED, reason=public_reason(error))

    async def tensors_of(self, job: Job) -> TensorsOf:
        """Return the federated tensors of a job, determined in a separate process; raises PortError."""
        known = self._tensors.get(job.id)
        if known is None:
            home = self._store.job_dir(job.id)
            data = () if job.spec.data is None else (str(home / job.spec.data),)
            output = await _flower(TENSORS_MODULE, str(self._bundle(job)), str(home), *data, limit_bytes=CLIENT_BYTES)
            known = self._tensors[job.id] = msgspec.json.decode(output, type=TensorsOf)
        return known

    def _alive(self) -> list[Job]:
        """Return the federated jobs that are not over."""
        return [job for job in self._store.all() if job.spec.federated and not job.state.is_over]

    # --- leases

    def _hold(self, job: Job, lease_s: float) -> None:
        """Free the job unless its leader is in contact within `lease_s`."""
        self._drop_lease(job)
        self._leases[job.id] = asyncio.get_running_loop().call_later(lease_s, self._expire, job.id)

    def _drop_lease(self, job: Job) -> None:
        held = self._leases.pop(job.id, None)
        if held is not None:
            held.cancel()

    def _expire(self, job_id: int) -> None:
        job = self._store.get(job_id)
        task = self._task(job)
        if task is not None:
            what = f"{task.leader} was silent for a whole round: job {job.label} is free"
            expiring = asyncio.get_running_loop().create_task(self._free(job, what))
            self._expiring.add(expiring)
            expiring.add_done_callback(self._expiring.discard)

    async def _free(self, job: Job, what: str) -> None:
        """End a job's work for its leader, and record `what` happened."""
        async with self._locks.setdefault(job.id, asyncio.Lock()):
            self._audit(what)
            task = self._task(job)
            if task is not None and not task.over:
                await self._give_up(job, task)

    async def _give_up(self, job: Job, task: _Task) -> None:
        """Record that nobody waits for the reply of a job any more."""
        self._drop_lease(job)
        self._note(job, msgspec.structs.replace(task, over=True))
        await self._rest(job)
        (self._folder(job) / START_FILE).unlink(missing_ok=True)
        await self._note_result(job)

    async def stop(self) -> None:
        """End Flower's processes; their work is repeated later."""
        for held in self._leases.values():
            held.cancel()
        tasks = {*self._clients.values(), *self._expiring}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- requests

    def _refuse(self, job: Job, leader: PeerClient) -> None:
        """Record once that a device asked to lead a job that it may not lead."""
        if (job.id, leader.id) not in self._refused_leaders:
            self._refused_leaders.add((job.id, leader.id))
            named = job.spec.terms.leader_name
            self._audit(
                f"{leader.name} asked to lead rounds of job {job.label} and was refused: "
                + (
                    f"its leader is {named}"
                    if named
                    else "only this device leads it (submit it with --leader to allow one)"
                )
            )

    async def _invited(self, job: Job, invitation: Invitation) -> TaskAnswer:
        reason = await self._objection(job, invitation.run, invitation.tensors)
        return _refused(reason) if reason else TaskAnswer(state=TaskState.READY)

    async def _objection(self, job: Job, run: str, tensors: str) -> str:
        """Return why a job does not take part now, or ""."""
        if not has_flower():
            return NO_FLOWER
        if job.state in (JobState.PAUSED, JobState.BACKOFF):
            return f"its job is {job.state.name.lower()}"
        task = self._task(job)
        if task is not None and task.run != run and self._is_busy(job):
            return f"it trains for the federation that {task.leader} leads"
        if (await self.tensors_of(job)).fingerprint != tensors:
            return "its job has other tensors or frozen weights; make both bundles from the same script and weights"
        return self._context.objection()

    async def _take(self, job: Job, leader: PeerClient, part: MessageChunk) -> TaskAnswer:
        folder, task = self._folder(job), self._task(job)
        if task is None or (task.message, task.total) != (part.message, part.total) or task.over:
            if part.offset:
                return TaskAnswer(state=TaskState.UNKNOWN)
            reason = await self._objection(job, part.run, part.tensors)
            most = 4 * (await self.tensors_of(job)).nbytes + CLIENT_BYTES // 64
            if not reason and part.total > most:
                reason = f"the message has {format_bytes(part.total)}, more than {format_bytes(most)}"
            if not reason and shutil.disk_usage(folder.parent).free < _COPIES * part.total:
                reason = f"its disk has no space for {_COPIES} times {format_bytes(part.total)}"
            if not reason and task is None and job.spec.terms.max_rounds is not None and (folder / _TASK_FILE).exists():
                reason = "the record of its rounds is damaged, and its owner limits them; submit the job again"
            if reason:
                return _refused(reason)
            rounds = 0 if task is None else task.rounds
            if task is None or task.run != part.run:
                self._audit(f"{leader.name} leads rounds of job {job.label} from now on")
            begun = _Task(part.run, part.message, part.total, leader.name, leader.id, part.number, part.lease_s, rounds)
            await self._begin(job, begun)
        self._hold(job, part.lease_s)
        message = IncomingFile(folder / MESSAGE_FILE, part.total, part.message)
        await asyncio.to_thread(message.take, part.offset, part.data)
        if not message.is_whole:
            return TaskAnswer(state=TaskState.RECEIVING, size=message.received)
        if not await asyncio.to_thread(message.verify):
            return TaskAnswer(state=TaskState.UNKNOWN, reason="the message was damaged in transit")
        self._advance(job)
        return TaskAnswer(state=TaskState.WORKING)

    async def _reply(self, job: Job, request: ReplyRequest) -> TaskAnswer:
        task, folder = self._task(job), self._folder(job)
        if task is None or task.message != request.message:
            return TaskAnswer(state=TaskState.UNKNOWN)
        if not task.over:
            self._hold(job, task.lease_s)
        if task.failed:
            return TaskAnswer(state=TaskState.FAILED, reason=task.failed)
        message, reply = IncomingFile(folder / MESSAGE_FILE, task.total), folder / REPLY_FILE
        if reply.exists() and job.id not in self._clients:
            if not request.offset:
                await self._note_result(job)  # if the agent was killed just after the reply was written
            return await asyncio.to_thread(_reply_part, reply, request.offset)
        if not message.is_whole:
            return TaskAnswer(state=TaskState.RECEIVING, size=message.received)
        self._advance(job)
        return TaskAnswer(state=TaskState.WORKING, reason=self._context.objection()[:REASON_LIMIT])

    async def _end(self, job: Job, end: RoundEnd) -> TaskAnswer:
        task = self._task(job)
        if task is not None and task.message == end.message and not task.over:
            if not (self._folder(job) / REPLY_FILE).exists():
                self._audit(f"{task.leader}: nobody waits for job {job.label}'s round any longer")
            await self._give_up(job, task)
        return TaskAnswer(state=TaskState.READY)

    # --- one message

    def _is_busy(self, job: Job) -> bool:
        task = self._task(job)
        if task is None or task.over or task.failed:
            return False
        return not (self._folder(job) / REPLY_FILE).exists()

    async def _begin(self, job: Job, task: _Task) -> None:
        """Abandon the job's current work, and begin work on another message."""
        await self._rest(job)
        before, folder = self._task(job), self._folder(job)
        kept = {MODEL_FILE, *([CONTEXT_FILE] if before is not None and before.run == task.run else [])}

        def clear() -> None:
            folder.mkdir(mode=0o700, exist_ok=True)
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in kept:
                    path.unlink()

        await asyncio.to_thread(clear)
        self._note(job, task)

    async def _rest(self, job: Job) -> None:
        """Stop the job's work: neither client nor worker runs then."""
        client = self._clients.get(job.id)
        if client is not None:
            client.cancel()
            await asyncio.wait({client})
        end_s = asyncio.get_running_loop().time() + _LEAVE_S
        while self._store.get(job.id).state is JobState.RUNNING:
            self._context.stop_worker(job.id)
            if asyncio.get_running_loop().time() > end_s:
                raise PortError(f"the worker of job {job.label} did not stop within {_LEAVE_S:g} s")
            await asyncio.sleep(0.05)
        now = self._store.get(job.id)
        if now.state is JobState.QUEUED:
            self._store.save(replace(now, state=JobState.WAITING_DATA, reason="waiting for the next round"))

    def _advance(self, job: Job) -> None:
        """Take the next action according to the files: the client, training, or the client again."""
        state, folder = self._store.get(job.id).state, self._folder(job)
        if job.id in self._clients or state in (JobState.QUEUED, JobState.RUNNING, JobState.BACKOFF):
            return
        if (folder / REPLY_FILE).exists():
            return  # a reply is made once: secure aggregation draws new keys each time
        if has_round(folder):
            self._train(job)
            return
        if (folder / RESULT_FILE).exists():
            loss = self._store.get(job.id).loss
            (folder / RESULT_FILE).with_suffix(".loss").write_text(repr(loss if loss is not None else 0.0))
        client = self._clients[job.id] = asyncio.get_running_loop().create_task(self._work(job))
        client.add_done_callback(lambda _: self._clients.pop(job.id, None))

    def _train(self, job: Job) -> None:
        now, task = self._store.get(job.id), self._task(job)
        most = job.spec.terms.max_rounds
        if task is not None and most is not None and task.rounds >= most:
            reason = f"its owner allows {most} rounds, which are done"
            self._note(job, msgspec.structs.replace(task, failed=reason))
            self._audit(f"{task.leader}: job {job.label} trains no further round: {reason}")
            (self._folder(job) / START_FILE).unlink(missing_ok=True)
            return
        if now.state is JobState.WAITING_DATA and task is not None:
            self._note(job, msgspec.structs.replace(task, rounds=task.rounds + 1))
            reason = f"a round for the federation that {task.leader} leads"
            fresh = replace(now, state=JobState.QUEUED, reason=reason, step=0, failed_at_step=0, failures=0, loss=None)
            self._store.save(fresh)
            self._context.wake()

    async def _work(self, job: Job) -> None:
        """Run the client once."""
        folder, task = self._folder(job), self._task(job)
        if task is None:
            return
        limit = CLIENT_BYTES + _COPIES * task.total
        try:
            of = await self.tensors_of(job)
            order = ClientOrder(
                str(folder), str(self._bundle(job)), str(self._state_dir), of.data, of.samples, job.spec.terms
            )
            output = await _flower(CLIENT_MODULE, msgspec.json.encode(order).decode(), limit_bytes=limit)
            self._audit_answer(job, task, msgspec.json.decode(output, type=ClientEnded))
        except (PortError, OSError) as error:
            self._note(job, msgspec.structs.replace(task, failed=public_reason(error)))
            self._audit(f"{task.leader}: a round of job {job.label} failed: {error}")
            return
        if has_round(folder):
            self._train(job)
        await self._note_result(job)

    def _audit_answer(self, job: Job, task: _Task, ended: ClientEnded) -> None:
        """Record what this device sent to a leader, or why it sent nothing."""
        which = f"{task.leader}: round {task.number} of job {job.label}"
        if ended.refused:
            self._note(job, msgspec.structs.replace(task, refused=ended.refused))
            self._audit(f"{which} was refused: {ended.refused}")
        elif ended.contributed and task.leader_id:
            self._audit(f"{which} received this device's weights, {ended.contributed}")

    async def _note_result(self, job: Job) -> None:
        """Make the average the job's result; the worker of a fine-tuning does that itself when it may run."""
        model = self._folder(job) / MODEL_FILE
        if not model.exists():
            return
        now = self._store.get(job.id)
        if job.spec.kind is JobKind.FINETUNE:
            if now.state is JobState.WAITING_DATA and not has_round(self._folder(job)):
                self._store.save(replace(now, state=JobState.QUEUED, reason="makes its adapter from the average"))
                self._context.wake()
        else:
            checksum = await asyncio.to_thread(file_checksum, model)
            if checksum != now.result_checksum:
                self._store.save(replace(now, result=str(model), result_checksum=checksum))

    # --- files

    def _bundle(self, job: Job) -> Path:
        path = bundle_path(job, self._store.job_dir(job.id))
        if path is None:
            raise PortError(f"job {job.label} has no bundle")
        return path

    def _folder(self, job: Job) -> Path:
        return self._store.job_dir(job.id) / FOLDER

    def _task(self, job: Job) -> _Task | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self._folder(job) / _TASK_FILE).read_bytes(), type=_Task)
        return None

    def _note(self, job: Job, task: _Task) -> None:
        write_atomically(self._folder(job) / _TASK_FILE, msgspec.json.encode(task))


def _reply_part(reply: Path, offset: int) -> TaskAnswer:
    data, digest = read_chunk(reply, offset), file_hash(reply)
    return TaskAnswer(state=TaskState.DONE, size=file_bytes(reply), data=data, sha256=digest)


def _refused(reason: str) -> TaskAnswer:
    return TaskAnswer(state=TaskState.REFUSED, reason=reason[:REASON_LIMIT])


async def _flower(module: str, *arguments: str, limit_bytes: int) -> bytes:
    """Return the output of a Flower process; raises PortError if it fails, OSError."""
    command = HelperCommand(module, arguments, flower_environment(), limit_bytes)
    try:
        return await ask_helper(command, within_s=_CLIENT_S)
    except HelperError as error:
        raise PortError(f"Flower's process {error}") from error
