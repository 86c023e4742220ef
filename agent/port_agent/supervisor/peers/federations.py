"""Federations that this device leads: round after round until all are done, across restarts.

A round is a process (`port_agent.federate.round`) that determines the messages and their recipients. This
module delivers them and fetches replies over the existing connections. Finished work is recorded in
`leader/run.json` of the job's directory.
"""

import asyncio
import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from port_agent.federate.orders import (
    LEADER_FOLDER,
    MESSAGES_FOLDER,
    FederationSettings,
    MessageReady,
    RepliesUnneeded,
    ReplyReport,
    RoundEnded,
    RoundEvent,
    RoundOrder,
    ServerStrategy,
    StrategySettings,
    global_file,
    server_file,
)
from port_agent.jobs.job import Job, JobRequestError
from port_agent.jobs.store import JobStore
from port_agent.peers.decoding import REASON_LIMIT
from port_agent.peers.exchange.answers import NotAnsweredError, Topic
from port_agent.peers.federation_requests import (
    FEDERATION_ANSWERS,
    FEDERATION_REQUESTS,
    MAX_MESSAGE_BYTES,
    FederationMessageError,
    Invitation,
    MembershipRequest,
    MessageChunk,
    ReplyRequest,
    Request,
    RoundEnd,
    TaskAnswer,
    TaskState,
    node_number,
)
from port_agent.peers.transfer import IncomingFile, file_bytes, read_chunk, sha256_of
from port_agent.supervisor.job.worker_kinds import bundle_path, proximal_mu
from port_agent.supervisor.peers.federated_jobs import (
    NO_FLOWER,
    THIS_DEVICE,
    FederatedJobs,
    flower_environment,
    has_flower,
)
from port_agent.supervisor.peers.peer_fleet import FleetKeeper
from port_agent.system.atomic_file import write_atomically
from port_agent.system.clock import Clock
from port_agent.system.helper_process import AsyncHelper, HelperCommand, start_helper
from port_planner.base.errors import PortError

ROUND_MODULE = "port_agent.federate.round"
LOOK_S = 5.0
"""Seconds between checks whether enough devices would take part, and before the next attempt
after an abandoned round.
"""
RETRY_S = 2.0
"""Seconds to wait after a device could not be reached; it may come back within the round."""
_FIRST_POLL_S, _SLOWEST_POLL_S = 0.2, 5.0
"""Shortest and longest time in seconds between queries to a device for its reply; training takes minutes."""
_SHORTEST_LEASE_S = 60.0
"""Least seconds of a lease; a lost connection is restored within this time."""
_HISTORY = 200
"""Number of rounds that are remembered."""
_MAX_FAULTS = 5
"""Consecutive rounds whose own process failed, after which the federation is abandoned."""
_FINAL_S = 120.0
"""Seconds in which all devices should receive the final average; the others get it with the next federation."""
_RUN_FILE = "run.json"
_ROUND_EVENTS: "msgspec.json.Decoder[RoundEvent]" = msgspec.json.Decoder(RoundEvent)


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a round ended: averaged over `devices`, or abandoned for a reason."""

    number: int
    at: float
    seconds: float
    devices: int = 0
    loss: float | None = None
    abandoned: str = ""
    lost: dict[str, str] = {}
    """Devices without a reply, and why."""
    names: tuple[str, ...] = ()
    """Devices whose reply is included."""


class FederationRun(msgspec.Struct, frozen=True, kw_only=True):
    """The stored state of a federation."""

    run: str
    settings: FederationSettings
    state: str = "running"
    """`running`, `finished`, `stopped` or `failed`."""
    done: int = 0
    abandoned: int = 0
    history: tuple[RoundRecord, ...] = ()
    without: tuple[str, ...] = ()
    """Devices that took part but did not receive the final average."""


class _LostError(PortError):
    """A device will not reply in this round."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A device that takes part."""

    node: int
    name: str
    id: str | None
    """Id of the device; None: this device."""


@dataclass(slots=True)
class _LedFederation:
    """A federation in progress."""

    task: asyncio.Task[None]
    waits: str = ""
    """Why no round runs."""
    round_devices: tuple[str, ...] = ()
    awaited: Mapping[str, str] = field(default_factory=dict)
    """Activity of each device without a reply, by name."""


class Federations:
    """All federations that this device leads, by the number of their job."""

    def __init__(
        self,
        store: JobStore,
        clock: Clock,
        fleet: FleetKeeper,
        jobs: FederatedJobs,
        audit: Callable[[str], None],
    ) -> None:
        self._store, self._clock, self._fleet, self._jobs, self._audit = store, clock, fleet, jobs, audit
        self._led: dict[int, _LedFederation] = {}

    # --- verbs

    def go_on(self) -> None:
        """Resume the federations of an earlier run of the agent; needs a running loop."""
        for job in self._store.all():
            run = self._run(job) if job.spec.federated and not job.state.is_over else None
            if run is not None and run.state == "running":
                self._lead(job)

    def start(self, name: str, settings: FederationSettings) -> dict[str, object]:
        """Begin to lead a federation with a job; raises JobRequestError."""
        job = self._store.find(name)
        if not has_flower():
            raise JobRequestError(NO_FLOWER, job.id)
        if not job.spec.federated or job.state.is_over:
            raise JobRequestError(
                f"job {job.label} is not federated; submit it with --federated here and on the other devices", job.id
            )
        if job.id in self._led:
            raise JobRequestError(
                f"a federation of job {job.label} is in progress; stop it with port-agent peer federate stop {job.id}",
                job.id,
            )
        if settings.secure and settings.clip:
            raise JobRequestError("--secure and --clip cannot be combined yet; choose one of them", job.id)
        if settings.noise and not settings.clip:
            raise JobRequestError(
                "noise without --clip gives no privacy, because it scales with the clipping norm; give --clip", job.id
            )
        if not settings.server.strategy.keeps_average and (settings.secure or settings.clip):
            what = settings.server.strategy.value
            raise JobRequestError(
                f"--strategy {what} cannot be combined with --secure or --clip yet; choose one of them", job.id
            )
        if settings.epsilon_budget is not None and not settings.noise:
            raise JobRequestError("without --noise every round spends the whole --epsilon-budget; give both", job.id)
        if settings.secure and settings.min_devices < 3:
            raise JobRequestError(
                "secure aggregation of two devices would reveal each to the other; give --min-devices 3", job.id
            )
        self._check_proximal(job, settings.server)
        folder = self._folder(job)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._note(job, FederationRun(run=secrets.token_hex(16), settings=settings))
        self._lead(job)
        self._audit(f"a federation of job {job.label} began: {settings.rounds} rounds")
        return self.describe(name)

    def _check_proximal(self, job: Job, server: StrategySettings) -> None:
        """Raise JobRequestError unless the strategy's proximal term equals the job's, with which devices train."""
        try:
            own = proximal_mu(job, bundle_path(job, self._store.job_dir(job.id)))
        except (PortError, OSError) as error:
            raise JobRequestError(f"job {job.label} cannot be federated: {error}", job.id) from error
        given = server.proximal_mu if server.strategy is ServerStrategy.FEDPROX else 0.0
        if own != given:
            has = f"trains with a proximal term of {own:g}" if own else "trains without a proximal term"
            lead = (
                f"--strategy fedprox --proximal-mu {own:g}"
                if own
                else "another --strategy, or submit jobs with proximal_mu"
            )
            raise JobRequestError(f"job {job.label} {has}, and not {given:g}; lead with {lead}", job.id)

    async def stop_leading(self, name: str) -> dict[str, object]:
        """End a federation after the finished rounds; raises JobRequestError if none is in progress."""
        job = self._store.find(name)
        led, run = self._led.get(job.id), self._run(job)
        if led is None or run is None:
            raise JobRequestError(
                f"no federation of job {job.label} is in progress; see `port-agent peer federate status`", job.id
            )
        led.task.cancel()
        await asyncio.wait({led.task})
        self._note(job, msgspec.structs.replace(run, state="stopped"))
        self._audit(f"the federation of job {job.label} was stopped after {run.done} rounds")
        return self.describe(name)

    def describe(self, name: str) -> dict[str, object]:
        """Return the state of a federation as plain values; raises JobRequestError if there is none."""
        job = self._store.find(name)
        run = self._run(job)
        if run is None:
            raise JobRequestError(
                f"job {job.label} was never federated from here; start with port-agent peer federate start {job.id}",
                job.id,
            )
        led, weights = self._led.get(job.id), self._folder(job) / global_file(run.done)
        plain: dict[str, object] = msgspec.to_builtins(run)
        return {
            **plain,
            "job": job.id,
            "name": job.spec.name,
            "kind": job.spec.kind.value,
            "waits": led.waits if led else "",
            "training": list(led.round_devices) if led else [],
            "awaited": dict(led.awaited) if led else {},
            "weights": str(weights) if weights.exists() else None,
        }

    def rows(self) -> list[dict[str, object]]:
        """Return the federations that were led here as plain values."""
        jobs = [job for job in self._store.all() if job.spec.federated and self._run(job) is not None]
        return [self.describe(str(job.id)) for job in jobs]

    def overview(self) -> list[dict[str, object]]:
        """Return the states of the federations in progress, one line each, as plain values."""
        return [
            {
                "name": row["name"],
                "done": row["done"],
                "rounds": run.settings.rounds,
                "training": row["training"],
                "awaited": row["awaited"],
                "waits": row["waits"],
                "loss": next((record.loss for record in reversed(run.history) if not record.abandoned), None),
            }
            for row in self.rows()
            if (run := self._run(self._store.get(int(str(row["job"]))))) is not None and run.state == "running"
        ]

    async def stop(self) -> None:
        """Stop what is running; it continues from the finished rounds when the agent starts again."""
        tasks = {led.task for led in self._led.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- leading

    def _lead(self, job: Job) -> None:
        task = asyncio.get_running_loop().create_task(self._conduct(job.id))
        self._led[job.id] = _LedFederation(task)
        task.add_done_callback(lambda _: self._led.pop(job.id, None))

    async def _conduct(self, job_id: int) -> None:
        """Run round after round."""
        faults = 0
        while True:
            job, led = self._store.get(job_id), self._led[job_id]
            run = self._run(job)
            if run is None or job.state.is_over:
                return
            if run.done >= run.settings.rounds:
                break
            try:
                members, led.waits = await self._ready(job, run)
            except (PortError, OSError) as error:
                self._note(job, msgspec.structs.replace(run, state="failed"))
                self._audit(f"the federation of job {job.label} failed: {error}")
                return
            if len(members) < run.settings.min_devices:
                await asyncio.sleep(LOOK_S)
                continue
            led.waits = ""
            record, is_fault = await self._round(job, run, members)
            faults = faults + 1 if is_fault else 0
            self._remember(job, record, faults)
            if faults >= _MAX_FAULTS:
                return
            if record.abandoned:
                led.waits = record.abandoned
                await asyncio.sleep(LOOK_S)
        await self._finish(self._store.get(job_id))

    def _remember(self, job: Job, record: RoundRecord, faults: int) -> None:
        run = self._run(job)
        if run is None:
            return
        history = (*run.history, record)[-_HISTORY:]
        done, abandoned = run.done + (not record.abandoned), run.abandoned + bool(record.abandoned)
        state = "failed" if faults >= _MAX_FAULTS else run.state
        self._note(job, msgspec.structs.replace(run, state=state, done=done, abandoned=abandoned, history=history))
        if done > 1:
            for old in (global_file(done - 2), server_file(done - 2)):
                (self._folder(job) / old).unlink(missing_ok=True)
        how = f"abandoned: {record.abandoned}" if record.abandoned else f"averaged over {record.devices} devices"
        self._audit(f"job {job.label}, round {record.number}: {how}")

    async def _finish(self, job: Job) -> None:
        """Send the average to all devices."""
        run = self._run(job)
        if run is None:
            return
        members, _ = await self._ready(job, run)
        received: tuple[str, ...] = ()
        if members:
            record, _ = await self._round(job, run, members, final=True)
            received = record.names
        without = tuple(sorted({name for one in run.history for name in one.names}.difference(received)))
        self._note(job, msgspec.structs.replace(run, state="finished", without=without))
        missed = f"; {', '.join(without)} did not receive the average" if without else ""
        self._audit(f"the federation of job {job.label} is finished: {run.done} rounds{missed}")

    async def _ready(self, job: Job, run: FederationRun) -> tuple[tuple[_Member, ...], str]:
        """Return the devices that would take part now, and why the others would not."""
        own = await self._fleet.own_id()
        tensors = (await self._jobs.tensors_of(job)).fingerprint
        others = [row for row in self._fleet.rows() if row["is_connected"]]
        known = [_Member(node_number(own), THIS_DEVICE.name, None)]
        known += [_Member(node_number(str(row["id"])), str(row["name"]), str(row["id"])) for row in others]
        answers = await asyncio.gather(
            *(self._invite(member, job.spec.name, run.run, tensors) for member in known), return_exceptions=True
        )
        ready, reasons = [], []
        for member, answer in zip(known, answers, strict=True):
            if isinstance(answer, TaskAnswer) and answer.state is TaskState.READY:
                ready.append(member)
            elif isinstance(answer, TaskAnswer | PortError):
                why = answer.reason if isinstance(answer, TaskAnswer) else str(answer)
                reasons.append(f"{member.name}: {why}")
            elif isinstance(answer, BaseException):
                raise answer
        needed = f"{len(ready)} of {run.settings.min_devices} devices are ready"
        return tuple(ready), "; ".join([needed, *reasons])

    async def _invite(self, member: _Member, name: str, run: str, tensors: str) -> TaskAnswer:
        """Return whether a device takes part now. A device whose owner does not allow this one to lead
        does not learn of the job.

        Raises NotAnsweredError, FederationMessageError.
        """
        if member.id is not None:
            may_lead = (await self._ask(member, MembershipRequest())).jobs
            if name not in may_lead:
                return TaskAnswer(
                    state=TaskState.REFUSED, reason=f"no job {name} there names this device as its leader"
                )
        return await self._ask(member, Invitation(job=name, run=run, tensors=tensors))

    async def _round(
        self, job: Job, run: FederationRun, members: tuple[_Member, ...], *, final: bool = False
    ) -> tuple[RoundRecord, bool]:
        """Run one round; return how it ended, and whether its own process failed."""
        began_s, folder, settings, led = self._clock.monotonic_s(), self._folder(job), run.settings, self._led[job.id]
        bundle = bundle_path(job, self._store.job_dir(job.id))
        messages = folder / MESSAGES_FOLDER
        await asyncio.to_thread(_emptied, messages)
        led.round_devices = tuple(member.name for member in members)
        order = RoundOrder(
            run_id=int(run.run[:15], 16),
            number=run.done + 1,
            folder=str(folder),
            bundle=str(bundle),
            names={member.node: member.name for member in members},
            goal=settings.goal or len(members),
            timeout_s=_FINAL_S if final else settings.timeout_s,
            min_share=settings.min_share,
            clip=settings.clip,
            noise=settings.noise,
            epsilon_budget=settings.epsilon_budget,
            secure=settings.secure and not final,
            final=final,
            server=settings.server,
        )
        tensors = (await self._jobs.tensors_of(job)).fingerprint
        by_node = {member.node: member for member in members}
        post = _Outbox(job.spec.name, run.run, tensors, order, messages, by_node, self._ask)
        led.awaited, ended, fault = post.awaited, RoundEnded(), ""
        try:
            ended = await post.do_round()
        except (PortError, OSError) as error:
            fault = str(error)
        finally:
            led.round_devices, led.awaited = (), {}
        is_averaged = not (fault or ended.abandoned)
        record = RoundRecord(
            number=run.done + 1,
            at=self._clock.wall_s(),
            seconds=round(self._clock.monotonic_s() - began_s, 1),
            devices=ended.averaged,
            loss=ended.loss,
            abandoned=fault or ended.abandoned,
            lost=ended.lost,
            names=tuple(member.name for member in members if is_averaged and member.name not in ended.lost),
        )
        return record, bool(fault)

    async def _ask(self, member: _Member, request: Request) -> TaskAnswer:
        """Return a device's answer; raises NotAnsweredError, FederationMessageError."""
        if member.id is None:
            return await self._jobs.respond(THIS_DEVICE, request)
        content = FEDERATION_REQUESTS.encode(request)
        name = hashlib.sha256(content).hexdigest()
        _, answer = await self._fleet.ask(member.id, Topic.FEDERATE, name, content)
        return FEDERATION_ANSWERS.decode(answer)

    # --- files

    def _folder(self, job: Job) -> Path:
        return self._store.job_dir(job.id) / LEADER_FOLDER

    def _run(self, job: Job) -> FederationRun | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self._folder(job) / _RUN_FILE).read_bytes(), type=FederationRun)
        return None

    def _note(self, job: Job, run: FederationRun) -> None:
        write_atomically(self._folder(job) / _RUN_FILE, msgspec.json.encode(run))


@dataclass(slots=True)
class _Outbox:
    """Delivers the messages of one round, which are files in a directory, and fetches replies; `ask`
    returns a device's answer.
    """

    job: str
    run: str
    tensors: str
    order: RoundOrder
    folder: Path
    members: Mapping[int, _Member]
    ask: Callable[[_Member, Request], Awaitable[TaskAnswer]]
    _under_way: dict[int, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)
    """Hash of the message to each node, and the task that delivers it."""
    awaited: dict[str, str] = field(default_factory=dict)
    """Activity of each device without a reply, by name."""
    _helper: AsyncHelper[RoundEvent] | None = None

    async def do_round(self) -> RoundEnded:
        """Run the round's process and return how it ended; raises PortError if it fails, OSError."""
        command = HelperCommand(ROUND_MODULE, environment=flower_environment())
        helper = self._helper = await start_helper(command, _ROUND_EVENTS, self.order)
        ended: RoundEnded | None = None
        try:
            while (event := await helper.event()) is not None:
                match event:
                    case MessageReady():
                        self._send(event.node, self.folder / event.file)
                    case RepliesUnneeded():
                        await self._forget(event.nodes)
                    case RoundEnded():
                        ended = event
        finally:
            end = await helper.close()
            await self._forget(list(self._under_way))
        if ended is None:
            raise PortError(f"the round's process {end}"[:REASON_LIMIT])
        return ended

    def _send(self, node: int, file: Path) -> None:
        digest = sha256_of(file)
        task = asyncio.get_running_loop().create_task(self._deliver(self.members[node], file, digest))
        self._under_way[node] = digest, task

    async def _deliver(self, member: _Member, file: Path, digest: str) -> None:
        """Deliver a message and fetch the reply; report the outcome to the round's process."""
        reply = file.with_name(f"{file.name}.reply")
        failed = ""
        try:
            await self._exchange(member, file, digest, reply)
        except _LostError as error:
            failed = str(error)
        self.awaited.pop(member.name, None)
        if self._helper is not None:
            self._helper.send(ReplyReport(node=member.node, file=file.name, reply=str(reply), failed=failed))

    async def _exchange(self, member: _Member, file: Path, digest: str, reply: Path) -> None:
        """Deliver a message and fetch its reply, waiting for the device if needed; raises
        _LostError if the device refuses.
        """
        wait_s = _FIRST_POLL_S
        offset: int | None = 0  # offset of the next part of the message; None: it is delivered
        while True:
            try:
                request = await asyncio.to_thread(self._request, file, digest, reply, offset)
                answer = await self.ask(member, request)
            except (NotAnsweredError, FederationMessageError) as error:
                self.awaited[member.name] = f"not reached: {str(error).removeprefix(f'{member.name}: ')}"
                await asyncio.sleep(RETRY_S)
                continue
            self.awaited[member.name] = _at_work(answer, is_delivered=offset is None)
            match answer.state:
                case TaskState.DONE if offset is None:
                    if await asyncio.to_thread(_take_reply, reply, answer, file_bytes(file)):
                        return
                case TaskState.WORKING | TaskState.DONE:
                    if offset is None:
                        await asyncio.sleep(wait_s)
                        wait_s = min(_SLOWEST_POLL_S, 1.5 * wait_s)
                    offset = None
                case TaskState.RECEIVING:
                    if (
                        offset is None or answer.size <= offset
                    ):  # a device that takes nothing is not sent it at full speed
                        await asyncio.sleep(_FIRST_POLL_S)
                    offset = answer.size
                case TaskState.UNKNOWN:
                    await asyncio.sleep(_FIRST_POLL_S if offset is None else RETRY_S)
                    offset = 0
                case _:
                    raise _LostError(answer.reason or answer.state.value)

    def _request(self, file: Path, digest: str, reply: Path, offset: int | None) -> Request:
        """Return the next request: a part of a message, or a request for the next part of the reply."""
        if offset is None:
            return ReplyRequest(job=self.job, run=self.run, message=digest, offset=file_bytes(reply))
        total = file_bytes(file)
        offset = min(offset, total - 1)
        return MessageChunk(
            job=self.job,
            run=self.run,
            message=digest,
            tensors=self.tensors,
            total=total,
            offset=offset,
            data=read_chunk(file, offset),
            number=self.order.number,
            lease_s=max(self.order.timeout_s, _SHORTEST_LEASE_S),
        )

    async def _forget(self, nodes: Iterable[int]) -> None:
        """Stop exchanges in progress, and tell those devices, and the ones that replied, that nobody waits."""
        ends = []
        for node in nodes:
            digest, task = self._under_way.pop(node, ("", None))
            if task is None:
                continue
            task.cancel()
            end = RoundEnd(job=self.job, run=self.run, message=digest)
            ends.append(self.ask(self.members[node], end))
        if ends:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await asyncio.gather(*ends, return_exceptions=True)


def _at_work(answer: TaskAnswer, *, is_delivered: bool) -> str:
    """Return the activity of a device that answers, in words."""
    if answer.reason:
        return answer.reason
    if answer.state is TaskState.DONE:
        return "sends its reply"
    return "works on it" if is_delivered else "receives the weights"


def _take_reply(reply: Path, answer: TaskAnswer, message_bytes: int) -> bool:
    """Store a part of a reply, and return whether it is complete.

    Raises OSError, and _LostError for a reply that is longer than masking and names can make it, ends early, or has a
    hash that differs from the device's.
    """
    most = 4 * message_bytes + (8 << 20)
    if answer.size > min(most, MAX_MESSAGE_BYTES):
        raise _LostError(f"its reply has {answer.size} bytes; at most {most} are accepted")
    incoming = IncomingFile(reply, answer.size, answer.sha256)
    incoming.take(incoming.received, answer.data)
    if not incoming.is_whole and not answer.data:
        raise _LostError("its reply is incomplete")
    if incoming.is_whole and not incoming.verify():
        raise _LostError("the hash of its reply does not match")
    return incoming.is_whole


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
