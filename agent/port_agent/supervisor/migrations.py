"""Moves jobs of this device to paired devices: offers them, sends them, watches them, and fetches them back. At every
moment, exactly one device has a job.

Before its files are sent, a job is `AWAY` here, on disk. It returns only when the other device reports it as done,
failed, stopped or unknown. After a power cut at any instant, both devices can continue, because this one asks again.
"""

import asyncio
import hashlib
import math
import secrets
import shutil
from collections.abc import Coroutine, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

from port_agent.facts import Answer
from port_agent.jobs.job import Away, AwayPhase, Job, JobState, Migratable, order
from port_agent.peers.exchange.answers import NotAnsweredError, Topic
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
    MigrationMessageError,
    MigrationState,
    Offer,
    Part,
    Request,
    Stop,
)
from port_agent.peers.transfer import FileTransfer, read_chunk
from port_agent.supervisor.context import DaemonContext
from port_agent.supervisor.job.promise import left_s, total_steps
from port_agent.supervisor.job.worker_kinds import bundle_path
from port_agent.supervisor.migration_files import (
    RESULT,
    STATE,
    free_bytes,
    job_sources,
    machine_kind,
    migrated_files,
    total_bytes,
)
from port_agent.supervisor.migration_paces import paces
from port_agent.system.atomic_file import sync_directory
from port_agent.system.checksum import file_checksum
from port_agent.system.clock import local_time
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes

RETRY_S = 5.0
"""Seconds before another attempt after a device could not be reached, or the disk rejected a write."""
REFUSED_S = 600.0
"""Seconds for which a device that refused a job, or gave it up, is not offered it again."""
RECALL_IF_IDLE_S = 600.0
"""Seconds without training after which a job comes back, if it could train here."""
MIN_MIGRATION_GAIN = 0.8
"""A migration must bring the time, or the joules, below this share of those here."""
_NETWORK_BYTES_PER_S = 10e6
"""Bytes per second of transfers whose parts are sent one after another (`exchange.ANSWER_EVERY_S`);
used only for the choice.
"""
_RETURNING = "returning"


class _LostError(PortError):
    """The other device rejects the job, or gave an impossible answer."""


class Migrations:
    """Moves jobs; `look` is called at every look of the daemon and never blocks."""

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._tended: dict[int, asyncio.Task[None]] = {}
        self._offering: asyncio.Task[None] | None = None
        self._next_offer_s = 0.0
        self._refused_until_s: dict[tuple[int, str], float] = {}
        """Time until which a device's refusal of a job counts (monotonic s), by job and device."""
        self._idle_since_s: dict[int, float] = {}
        """Time at which a job was last seen to train there (monotonic s), by job."""
        self._staying: set[int] = set()
        """Jobs for which the reason why they cannot move was already reported."""

    def look(self) -> None:
        """Manage migrated jobs, and offer waiting ones."""
        context, now_s = self._context, self._context.clock.monotonic_s()
        for job in context.store.all():
            if job.away is not None and job.id not in self._tended:
                task = self._tended[job.id] = _start(self._tend(job.id))
                task.add_done_callback(partial(self._untended, job.id))
        if self._offering is None and now_s >= self._next_offer_s and any(map(self._may_migrate, context.store.all())):
            self._next_offer_s = now_s + context.seams.offer_every_s
            self._offering = _start(self._offer_all())
            self._offering.add_done_callback(self._offered)

    def _untended(self, job_id: int, task: "asyncio.Task[None]") -> None:
        self._tended.pop(job_id, None)
        self._check(task, "a job that is away")

    async def stop(self) -> None:
        """Stop what is in progress; it continues when the agent starts again."""
        tasks = {*self._tended.values(), *([self._offering] if self._offering else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- offering

    def _may_migrate(self, job: Job) -> bool:
        waits = job.state is JobState.QUEUED and self._context.runners.of_job(job.id) is None
        return job.spec.movable is not Migratable.NEVER and waits and job.away is None

    def _offered(self, task: "asyncio.Task[None]") -> None:
        self._offering = None
        self._check(task, "offering jobs")

    @staticmethod
    def _check(task: "asyncio.Task[None]", what: str) -> None:
        """Report an internal error, which ends the task but never the agent."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            asyncio.get_running_loop().call_exception_handler({"message": f"{what} failed", "exception": error})

    async def _offer_all(self) -> None:
        for job in order(filter(self._may_migrate, self._context.store.all())):
            try:
                await self._offer(job)
            except (PortError, OSError) as error:
                self._note(job, f"cannot move: {error}")
                self._next_offer_s = self._context.clock.monotonic_s() + REFUSED_S

    async def _offer(self, job: Job) -> None:
        """Ask the connected devices, and send the job to the best one if that is better than training here."""
        context = self._context
        if context.admission.decision is None or context.admission.facts.metered is Answer.YES:
            return
        directory = context.store.job_dir(job.id)
        sources = await asyncio.to_thread(job_sources, job, directory)
        nbytes = await asyncio.to_thread(total_bytes, sources)
        least, bundle = context.runners.host.least_bytes(job), bundle_path(job, directory)
        if bundle is None or math.isinf(least):
            return
        facts = await asyncio.to_thread(context.seams.kinds[job.spec.kind].read_bundle, bundle)
        if facts.reads_files:
            self._stays(
                job, f"cannot move: it reads {facts.reads_files[0]} during training, which other devices do not have"
            )
            return
        began = any(name.startswith(f"{STATE}/") for name in sources)
        offer = Offer(
            token=secrets.token_hex(16),
            nbytes=nbytes,
            least_bytes=math.ceil(least),
            device_kind=facts.device_kind,
            machine=machine_kind() if began else "",
        )
        welcome = await self._welcomes(job, offer)
        best = self._best(job, nbytes, welcome)
        now = context.store.get(job.id)
        if best is None or not self._may_migrate(now):
            return
        device, name = best
        away = Away(device, name, offer.token, AwayPhase.SENDING)
        context.store.save(replace(now, state=JobState.AWAY, away=away, reason="its files are being sent"))
        self._note(now, f"is moving to {name}")
        context.wake.set()

    def _stays(self, job: Job, why: str) -> None:
        """Report once why a job cannot move."""
        if job.id not in self._staying:
            self._staying.add(job.id)
            self._note(job, why)

    async def _welcomes(self, job: Job, offer: Offer) -> dict[tuple[str, str], MigrationAnswer]:
        """Return the answers of the devices that would accept the job, by id and name."""
        now_s = self._context.clock.monotonic_s()
        wanted = [
            (str(row["id"]), str(row["name"]))
            for row in self._context.peers.fleet.rows()
            if row["is_connected"] and self._refused_until_s.get((job.id, str(row["id"])), 0.0) <= now_s
        ]
        answers = await asyncio.gather(*(self._ask(device, offer) for device, _ in wanted), return_exceptions=True)
        found = {}
        for who, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, MigrationAnswer) and answer.state is MigrationState.WELCOME:
                found[who] = answer
            elif isinstance(answer, BaseException) and not isinstance(answer, PortError):
                raise answer
        return found

    def _best(
        self, job: Job, nbytes: int, welcome: Mapping[tuple[str, str], MigrationAnswer]
    ) -> tuple[str, str] | None:
        """Return the device where the job would finish first, or take the fewest joules;
        None if that is this device.
        """
        own_pace, own_joules = paces(self._context)
        takes_s = left_s(job)
        costs = {
            who: nbytes / _NETWORK_BYTES_PER_S + takes_s * answer.pace / own_pace for who, answer in welcome.items()
        }
        here = self._here_s(job)
        if job.spec.movable is Migratable.CHEAPEST:
            costs, here = {who: answer.joules_pace for who, answer in welcome.items()}, own_joules
        who = min(costs, key=lambda one: costs[one], default=None)
        return who if who is not None and costs[who] < MIN_MIGRATION_GAIN * here else None

    def _here_s(self, job: Job) -> float:
        """Return when the job would finish here, in seconds from now; infinity if unknown."""
        context, wall_s = self._context, self._context.clock.wall_s()
        line = order(other for other in context.store.all() if other.state in (JobState.QUEUED, JobState.RUNNING))
        ahead = line[: next(at for at, other in enumerate(line) if other.id == job.id)]
        busy = [other for _, other in context.runners.busy().values() if other not in ahead]
        before_s = sum(left_s(other) or math.inf for other in [*ahead, *busy])
        decision = context.admission.decision
        if decision is not None and decision.state.trains:
            return before_s + left_s(job)
        if math.isinf(before_s):
            return math.inf
        forecast = context.usual_times.forecast(local_time(wall_s), before_s + left_s(job))
        return math.inf if forecast is None or forecast.ends_at is None else forecast.ends_at.timestamp() - wall_s

    # --- one migrated job

    async def _tend(self, job_id: int) -> None:
        """Take the next actions for a job until no other device has any part of it."""
        while True:
            job = (
                self._context.store.get(job_id) if any(job.id == job_id for job in self._context.store.all()) else None
            )
            if job is None or job.away is None:
                return
            try:
                await self._go_on(job, job.away)
            except _LostError as error:
                self._come_back(job, f"{job.away.name}: {error}")
            except (PortError, OSError) as error:
                if not self._is_paired(job.away.device):
                    self._come_back(job, f"{job.away.name} is no longer paired", closed=True)
                    continue
                self._report(job, f"not reached: {error}" if isinstance(error, NotAnsweredError) else str(error))
                await asyncio.sleep(RETRY_S)

    async def _go_on(self, job: Job, away: Away) -> None:
        """Take one action. Raises _LostError if the job must come back without its checkpoint, PortError, OSError."""
        if job.state is not JobState.AWAY and away.phase is not AwayPhase.CLOSING:  # cancelled
            self._change(job, phase=AwayPhase.CLOSING)
        elif away.phase is AwayPhase.CLOSING:
            await self._close(job, away)
        elif away.phase is AwayPhase.SENDING and away.recalled:
            raise _LostError("recalled before it left")
        elif away.phase is AwayPhase.SENDING:
            await self._bring(job, away)
            if self._is_still(job):
                self._change(job, phase=AwayPhase.THERE)
                await self._flush()
        else:
            await self._watch(job, away)

    async def _bring(self, job: Job, away: Away) -> None:
        """Send all files."""
        sources = await asyncio.to_thread(job_sources, job, self._context.store.job_dir(job.id))
        files = await asyncio.to_thread(migrated_files, sources)
        spec = job.spec
        moved = MigratedJob(
            name=spec.name,
            epochs=spec.epochs,
            steps=spec.steps,
            checkpoint_every=spec.checkpoint_every,
            deadline_at=spec.deadline_at,
            step=job.step,
            total_steps=total_steps(job),
        )
        answer = await self._ask(away.device, Bring(token=away.token, job=moved, files=files))
        brought, nbytes = 0, max(1, sum(file.nbytes for file in files))
        while answer.state is MigrationState.RECEIVING and answer.file < len(files) and self._is_still(job):
            path, offset = sources[files[answer.file].path], answer.offset
            data = await asyncio.to_thread(read_chunk, path, offset)
            if not data:
                raise _LostError(f"{path} changed while it was sent")
            answer = await self._ask(away.device, Part(token=away.token, file=answer.file, offset=offset, data=data))
            brought += len(data)
            self._report(job, f"its files are being sent, {min(100, 100 * brought // nbytes)} %")
        if answer.state in (MigrationState.REFUSED, MigrationState.UNKNOWN, MigrationState.CLOSED):
            raise _LostError(answer.reason or answer.state.value)

    async def _watch(self, job: Job, away: Away) -> None:
        """Ask for the job's state, or stop it; fetch its result."""
        if away.recalled:
            answer = await self._ask(away.device, Stop(token=away.token))
        else:
            answer = await self._ask(away.device, Look(token=away.token))
        if not self._is_still(job):
            return
        match answer.state:
            case MigrationState.RECEIVING:
                await self._hand_over(job, away)
            case MigrationState.UNKNOWN:
                raise _LostError("it does not have the job")
            case MigrationState.DONE:
                await self._take_result(job, away, answer)
            case MigrationState.STOPPED | MigrationState.FAILED:
                await self._take_checkpoint(job, away, answer)
            case MigrationState.WORKING | MigrationState.STOPPING:
                self._progress(job, answer)
                self._recall_idle(job, answer)
                await asyncio.sleep(self._context.seams.away_look_s)
            case _:
                raise NotAnsweredError(answer.reason or f"it reports {answer.state.value}")

    async def _hand_over(self, job: Job, away: Away) -> None:
        """Record on disk that the other device may start, and tell it to."""
        await self._flush()
        answer = await self._ask(away.device, Begin(token=away.token))
        if answer.state is MigrationState.RECEIVING:  # the files there were damaged, or lost in an interruption
            await self._bring(job, away)
        elif answer.state is MigrationState.REFUSED:  # the next look shows whether it has the job
            looked = await self._ask(away.device, Look(token=away.token))
            if looked.state in (MigrationState.RECEIVING, MigrationState.UNKNOWN):
                raise _LostError(answer.reason)
        else:
            self._note(job, f"is now on {away.name}")

    async def _take_result(self, job: Job, away: Away, answer: MigrationAnswer) -> None:
        """Make the weights that the other device trained the job's result."""
        if [file.path for file in answer.files] != [RESULT]:
            raise NotAnsweredError("it reports that the job is done but has no result")
        folder = await self._fetched(job, away, answer.files)
        if not self._is_still(job):
            return
        target = self._context.store.job_dir(job.id) / RESULT
        await asyncio.to_thread((folder / RESULT).replace, target)
        await asyncio.to_thread(sync_directory, target.parent)
        checksum = await asyncio.to_thread(file_checksum, target)
        now = self._context.store.get(job.id)
        if not self._is_still(job) or now.away is None:
            return
        context = self._context
        done = replace(
            now,
            state=JobState.FINISHED,
            reason=f"trained on {away.name}",
            step=answer.step,
            failures=0,
            total_steps=_total_steps(now, answer),
            loss=answer.loss,
            trained_s=now.trained_s + answer.trained_s,
            finished_at=context.clock.wall_s(),
            result=str(target),
            result_checksum=checksum,
            away=replace(now.away, phase=AwayPhase.CLOSING),
        )
        context.store.save(done)
        context.timers.set_deadline(job.id, None)
        context.health.clear("deadline-missed", str(job.id))
        self._note(job, f"was trained on {away.name}")
        await self._flush()

    async def _take_checkpoint(self, job: Job, away: Away, answer: MigrationAnswer) -> None:
        """Continue here from the other device's position, or, if that is another kind of
        machine, from where the job left.
        """
        step = job.step
        bad = [file.path for file in answer.files if not file.path.startswith(f"{STATE}/")]
        if bad:
            raise NotAnsweredError(f"it calls {bad[0]} a checkpoint")
        if answer.files and answer.machine == machine_kind():
            folder = await self._fetched(job, away, answer.files)
            if not self._is_still(job):
                return
            await asyncio.to_thread(_exchange_state, self._context.store.job_dir(job.id) / STATE, folder / STATE)
            step = answer.step
        if not self._is_still(job):
            return
        now = self._context.store.get(job.id)
        stays = answer.state is MigrationState.FAILED or away.recalled
        spec = replace(now.spec, movable=Migratable.NEVER) if stays else now.spec
        total = _total_steps(now, answer)
        back = replace(now, spec=spec, step=step, total_steps=total, trained_s=now.trained_s + answer.trained_s)
        self._context.store.save(back)
        why = f"failed there: {answer.reason}" if answer.state is MigrationState.FAILED else "came back"
        self._come_back(job, f"{away.name}: {why}")
        await self._flush()

    async def _fetched(self, job: Job, away: Away, files: tuple[MigratedFile, ...]) -> Path:
        """Return a directory with the job's files from the other device, durable and complete.

        Raises OSError, PortError.
        """
        folder = self._context.store.job_dir(job.id) / _RETURNING
        await asyncio.to_thread(_cleared, folder, {file.path for file in files})
        transfer = FileTransfer([file.into(folder / file.path) for file in files])
        await asyncio.to_thread(transfer.prepare)
        for file, incoming in zip(files, transfer.files, strict=True):
            while (offset := incoming.received) < file.nbytes:
                self.check_free(folder, file.nbytes - offset)
                answer = await self._ask(away.device, Fetch(token=away.token, path=file.path, offset=offset))
                if answer.state is not MigrationState.PART or not answer.data:
                    raise NotAnsweredError(answer.reason or f"{file.path} is incomplete there")
                await asyncio.to_thread(incoming.take, offset, answer.data)
        damaged = await asyncio.to_thread(transfer.verify)
        if damaged is not None:
            raise NotAnsweredError(f"{damaged.path.relative_to(folder)} was damaged in transit")
        for incoming in transfer.files:
            await asyncio.to_thread(sync_directory, incoming.path)
        return folder

    def check_free(self, folder: Path, nbytes: int) -> None:
        """Raise PortError if this device's disk lacks space for the files; the other device then keeps them."""
        free = free_bytes(folder) - self._context.config.policy.min_free_disk_bytes
        if free < nbytes:
            raise PortError(
                f"{format_bytes(nbytes)} wait there for free space on the disk here; {format_bytes(max(0, free))} are "
                "free"
            )

    async def _close(self, job: Job, away: Away) -> None:
        """Make the other device delete the job."""
        answer = await self._ask(away.device, Close(token=away.token))
        if answer.state is not MigrationState.CLOSED:
            await asyncio.sleep(self._context.seams.away_look_s)
            return
        directory = self._context.store.job_dir(job.id)
        await asyncio.to_thread(shutil.rmtree, directory / _RETURNING, ignore_errors=True)
        self._context.store.save(replace(self._context.store.get(job.id), away=None))

    # --- state

    def _is_still(self, job: Job) -> bool:
        """Return whether the job was neither cancelled nor recalled since then."""
        now = self._context.store.get(job.id)
        token = job.away.token if job.away is not None else ""
        return now.state is JobState.AWAY and now.away is not None and now.away.token == token

    def _change(self, job: Job, *, phase: AwayPhase) -> None:
        now = self._context.store.get(job.id)
        if now.away is not None:
            self._context.store.save(replace(now, away=replace(now.away, phase=phase)))

    def _come_back(self, job: Job, reason: str, *, closed: bool = False) -> None:
        """Queue the job here. The other device must still delete it, unless it is no longer trusted (`closed`)."""
        context, now = self._context, self._context.store.get(job.id)
        if now.away is None:
            return
        until_s = context.clock.monotonic_s() + REFUSED_S
        self._refused_until_s[job.id, now.away.device] = until_s
        self._idle_since_s.pop(job.id, None)
        away = None if closed else replace(now.away, phase=AwayPhase.CLOSING)
        state = JobState.QUEUED if now.state is JobState.AWAY else now.state
        context.store.save(
            replace(now, state=state, reason=reason if state is JobState.QUEUED else now.reason, away=away)
        )
        self._note(job, f"is back: {reason}")
        context.wake.set()

    def _progress(self, job: Job, answer: MigrationAnswer) -> None:
        now = self._context.store.get(job.id)
        total = _total_steps(now, answer)
        update = replace(now, step=answer.step, total_steps=total, loss=answer.loss, reason=answer.reason)
        if update != now:
            self._context.store.keep_in_memory(update)

    def _recall_idle(self, job: Job, answer: MigrationAnswer) -> None:
        context, now_s = self._context, self._context.clock.monotonic_s()
        since_s = self._idle_since_s.setdefault(job.id, now_s)
        if answer.trains or answer.state is MigrationState.STOPPING:
            self._idle_since_s[job.id] = now_s
            return
        decision, now = context.admission.decision, context.store.get(job.id)
        free_here = decision is not None and decision.state.trains and not context.runners.busy()
        if now_s - since_s > RECALL_IF_IDLE_S and free_here and now.away is not None and not now.away.recalled:
            context.store.save(replace(now, away=replace(now.away, recalled=True)))
            self._note(job, f"is recalled from {now.away.name}, where it is waiting: {answer.reason}")

    def _report(self, job: Job, reason: str) -> None:
        now = self._context.store.get(job.id)
        if now.state is JobState.AWAY and now.reason != reason:
            self._context.store.keep_in_memory(replace(now, reason=reason))

    def _note(self, job: Job, text: str) -> None:
        self._context.store.note(self._context.clock.wall_s(), job.id, "moved", text)

    def _is_paired(self, device: str) -> bool:
        return any(row["id"] == device for row in self._context.peers.fleet.rows())

    async def _flush(self) -> None:
        """Write everything saved to disk; raises StoreError if the disk rejects it."""
        if not await asyncio.to_thread(self._context.store.flush) and self._context.store.trouble is not None:
            raise self._context.store.trouble

    async def _ask(self, device: str, request: Request) -> MigrationAnswer:
        """Return a device's answer; raises NotAnsweredError, PairedDeviceError, MigrationMessageError."""
        content = MIGRATION_REQUESTS.encode(request)
        name = hashlib.sha256(content).hexdigest()
        _, answer = await self._context.peers.fleet.ask(device, Topic.MIGRATE, name, content)
        try:
            return MIGRATION_ANSWERS.decode(answer)
        except MigrationMessageError as error:
            self._context.peers.fleet.cut(device, str(error))
            raise


def _total_steps(job: Job, answer: MigrationAnswer) -> int | None:
    """Return the total steps of a job: the other device's figure once its worker has reported it,
    otherwise the figure known here.
    """
    return answer.total_steps or job.total_steps


def _cleared(folder: Path, kept: Set[str]) -> None:
    """Create a directory that contains no files except the `kept` ones of an earlier try; raises OSError."""
    if any(path.relative_to(folder).as_posix() not in kept for path in folder.rglob("*") if path.is_file()):
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)


def _exchange_state(state: Path, fetched: Path) -> None:
    """Replace the local checkpoint by a fetched one; after an interruption, the missing part is fetched again.

    Raises OSError.
    """
    shutil.rmtree(state, ignore_errors=True)
    fetched.rename(state)
    sync_directory(state)
    sync_directory(state.parent)


def _start(work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    return asyncio.get_running_loop().create_task(work)
