"""Jobs of paired devices that are trained here: accepted if this device's owner and policy allow
it, and returned when done.

Received files stay in `moving/TOKEN` until they are complete and the owner hands the job over; then it is
a job like any other, last in the queue. All state is on disk, so a restart continues from there, and
every request may be repeated.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

import msgspec

from port_agent.facts import Answer
from port_agent.jobs.job import Guest, Job, JobSpec, JobState, check_spec, name_like
from port_agent.peers.decoding import REASON_LIMIT, public_reason
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
    MigrationAnswer,
    MigrationMessageError,
    MigrationState,
    Offer,
    Part,
    Request,
    Stop,
)
from port_agent.peers.transfer import FileTransfer, file_hash, read_chunk
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.context import DaemonContext
from port_agent.supervisor.dispatch import granted_limits, run_conditions
from port_agent.supervisor.job.runner import LAST_COMMIT_S
from port_agent.supervisor.job.worker_kinds import LOOKED_FOR
from port_agent.supervisor.migration_files import (
    DATA,
    RESULT,
    STATE,
    free_bytes,
    machine_kind,
    migrated_files,
    tree,
)
from port_agent.supervisor.migration_paces import paces
from port_agent.supervisor.service import BUNDLE_NAME
from port_agent.system.atomic_file import sync_directory, write_atomically
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes

FOLDER = "moving"
_ANNOUNCED = "announced"
_OWNER = "owner"
"""Name of the file with the id of the device that announced the job."""
_STALE_S = 300.0
"""Seconds after which a stalled transfer makes way for another device's job."""
_LAST_IN_LINE = -100
_FREE_COPIES = 2
"""Required free space, as a multiple of the received size: checkpoints and the result are as large as the weights in
the bundle.
"""
_WORK = (JobState.QUEUED, JobState.RUNNING, JobState.BACKOFF)
"""States in which a job counts as this device's own work."""
_GIVEN_BACK = "given back to its device"


class Guests:
    """Answers the devices that send jobs here."""

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        """Lock that is held while a request is answered, so that requests are answered one at a time."""

    async def answer(self, client: PeerClient, content: bytes) -> bytes:
        """Return the answer to a request, whatever the request contains."""
        try:
            request = MIGRATION_REQUESTS.decode(content)
        except MigrationMessageError as error:
            self._context.peers.audit(f"{client.name}: {error}")
            return MIGRATION_ANSWERS.encode(_refused(str(error)))
        working = asyncio.create_task(self._respond(client, request))
        return MIGRATION_ANSWERS.encode(
            await asyncio.shield(working)
        )  # what was started is finished, even if the connection is lost

    def drop_unpaired(self, paired: Set[str]) -> None:
        """End the jobs of devices that are no longer trusted; `paired` are the ids of the trusted ones."""
        for job in self._context.store.all():
            if job.spec.guest is None or job.spec.guest.device in paired:
                continue
            if not job.state.is_over:
                self._end(job.id)
            elif self._context.runners.of_job(job.id) is None:
                self._context.store.forget(job.id)
        for folder in self._coming():
            if _owner(folder) not in paired:
                shutil.rmtree(folder)

    async def _respond(self, client: PeerClient, request: Request) -> MigrationAnswer:
        async with self._turn:
            try:
                return await self._act(client, request)
            except (OSError, PortError) as error:
                return _refused(public_reason(error))

    async def _act(self, client: PeerClient, request: Request) -> MigrationAnswer:
        job = self._job(request.token)
        if job is not None and job.spec.guest is not None and job.spec.guest.device != client.id:
            return MigrationAnswer(state=MigrationState.UNKNOWN)
        folder = self._folder(request.token)
        if folder.exists() and _owner(folder) != client.id:
            return MigrationAnswer(state=MigrationState.UNKNOWN)
        match request:
            case Offer():
                return self._offered(client, request)
            case Bring():
                return await self._announced(client, request)
            case Part():
                return await self._take(request)
            case Begin():
                return await self._begin(client, request)
            case Look():
                return await self._look(request.token)
            case Stop():
                return await self._stop(request.token)
            case Fetch():
                return await self._fetch(request)
            case Close():
                return await self._close(client, request.token)

    # --- whether it is accepted

    def _offered(self, client: PeerClient, offer: Offer) -> MigrationAnswer:
        reason = self._objection(offer.nbytes) or self._unfit(offer)
        if reason:
            return _refused(reason)
        pace, joules_pace = paces(self._context, client.id)
        return MigrationAnswer(state=MigrationState.WELCOME, pace=pace, joules_pace=joules_pace)

    def _objection(self, nbytes: int) -> str:
        """Return why no job is accepted now, or ""."""
        context, decision = self._context, self._context.admission.decision
        if not context.config.options.take_jobs:
            return "it takes no jobs (set take_jobs = true under [peers] there)"
        if decision is None:
            return "it has just started"
        if not decision.state.trains:
            return "; ".join(decision.reasons)
        if context.admission.facts.metered is Answer.YES:
            return "its network is metered"
        if context.runners.busy() or any(job.state in _WORK for job in context.store.all()):
            return "it has work of its own"
        return self._too_full(_FREE_COPIES * nbytes)

    def _too_full(self, nbytes: int) -> str:
        kept = self._context.config.policy.min_free_disk_bytes
        free = free_bytes(self._context.settings.state_dir) - kept
        return f"its disk can give {format_bytes(max(0, free))}, not {format_bytes(nbytes)}" if free < nbytes else ""

    def _unfit(self, offer: Offer) -> str:
        context = self._context
        devices = context.admission.facts.devices
        if offer.device_kind in LOOKED_FOR and (devices is None or offer.device_kind not in devices):
            return f"it has no {offer.device_kind} device"
        memory = run_conditions(context, self._limits()).memory_bytes
        if memory is not None and offer.least_bytes > memory:
            return f"it grants {format_bytes(memory)} of memory; the job needs {format_bytes(offer.least_bytes)}"
        if offer.machine and offer.machine != machine_kind():
            return "the job began on another kind of machine and must keep its bits"
        return ""

    def _limits(self) -> ResourceLimits:
        decision = self._context.admission.decision
        policy = self._context.config.policy
        return policy.not_in_use if decision is None else granted_limits(policy, decision.state)

    # --- how it arrives

    async def _announced(self, client: PeerClient, bring: Bring) -> MigrationAnswer:
        if self._job(bring.token) is not None:
            return MigrationAnswer(state=MigrationState.WORKING)
        folder, nbytes = self._folder(bring.token), sum(file.nbytes for file in bring.files)
        known = self._known(bring.token)
        if known is not None and known.files == bring.files:
            return self._received(known)
        reason = self._objection(nbytes) or await asyncio.to_thread(self._other_comes, client)
        if not reason and [file.path for file in bring.files if file.path == BUNDLE_NAME] != [BUNDLE_NAME]:
            reason = "its files are not those of a job: it has exactly one bundle"
        if not reason and not all(_expected(file.path) for file in bring.files):
            reason = "its files are not those of a job: besides the bundle it has only state and data"
        if reason:
            return _refused(reason)

        def begin_anew() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)
            write_atomically(folder / _OWNER, client.id.encode())
            write_atomically(folder / _ANNOUNCED, MIGRATION_REQUESTS.encode(bring))

        await asyncio.to_thread(begin_anew)
        self._context.peers.audit(f"{client.name}: its job {bring.job.name} is arriving, {format_bytes(nbytes)}")
        return self._received(bring)

    def _other_comes(self, client: PeerClient) -> str:
        """Return why a job must wait for another one that is arriving, or "".

        Removes one that was abandoned or comes from the same device.
        """
        for folder in self._coming():
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if _owner(folder) != client.id and time.time() - newest < _STALE_S:
                return "it is receiving another device's job"
            shutil.rmtree(folder)
        return ""

    def _coming(self) -> list[Path]:
        """Return the folders of announced jobs."""
        return list((self._context.settings.state_dir / FOLDER).glob("*"))

    async def _take(self, part: Part) -> MigrationAnswer:
        known = self._known(part.token)
        if known is None:
            return await self._look(part.token)
        transfer = self._transfer(known)
        if transfer.position == (part.file, part.offset) and part.file < len(known.files):
            reason = self._too_full(len(part.data))
            if reason:
                return _refused(reason)
            await asyncio.to_thread(transfer.files[part.file].take, part.offset, part.data)
        return self._received(known)

    async def _begin(self, client: PeerClient, begin: Begin) -> MigrationAnswer:
        known, folder = self._known(begin.token), self._folder(begin.token)
        if known is None or self._job(begin.token) is not None:
            return await self._look(begin.token)
        received = self._received(known)
        if received.file < len(known.files):
            return received
        if await asyncio.to_thread(self._transfer(known).verify) is not None:
            return self._received(known)
        spec = self._spec(client, known)
        await asyncio.to_thread(self._context.seams.kinds[spec.kind].read_bundle, folder / str(_bundle_number(known)))
        store, wall_s = self._context.store, self._context.clock.wall_s()
        job = await asyncio.to_thread(store.add, spec, wall_s, _mover(known, folder))
        at = known.job
        store.save(replace(store.get(job.id), step=at.step, failed_at_step=at.step, total_steps=at.total_steps))
        store.note(wall_s, job.id, "submitted", f"came from {client.name} at step {at.step}")
        self._context.peers.audit(f"{client.name}: its job {known.job.name} is job {job.id} here")
        if spec.deadline_at is not None:
            self._context.timers.set_deadline(job.id, spec.deadline_at)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._context.wake.set()
        return await self._look(begin.token)

    def _spec(self, client: PeerClient, known: Bring) -> JobSpec:
        job = known.job
        name = name_like(f"{name_like(job.name)[:50]}.{known.token[:8]}")
        data = DATA if any(file.path.startswith(f"{DATA}/") for file in known.files) else None
        return check_spec(
            JobSpec(
                name=name,
                bundle=BUNDLE_NAME,
                data=data,
                epochs=job.epochs,
                steps=job.steps,
                checkpoint_every=job.checkpoint_every,
                priority=_LAST_IN_LINE,
                deadline_at=job.deadline_at,
                guest=Guest(client.name, known.token, client.id),
            )
        )

    def _received(self, bring: Bring) -> MigrationAnswer:
        number, offset = self._transfer(bring).position
        return MigrationAnswer(state=MigrationState.RECEIVING, file=number, offset=offset)

    def _transfer(self, bring: Bring) -> FileTransfer:
        folder = self._folder(bring.token)
        return FileTransfer([file.into(folder / str(number)) for number, file in enumerate(bring.files)])

    # --- its state, and its departure

    async def _look(self, token: str) -> MigrationAnswer:
        job = self._job(token)
        if job is None:
            known = self._known(token)
            return MigrationAnswer(state=MigrationState.UNKNOWN) if known is None else self._received(known)
        state = {
            JobState.FINISHED: MigrationState.DONE,
            JobState.FAILED: MigrationState.FAILED,
            JobState.CANCELLED: MigrationState.STOPPED,
        }.get(job.state, MigrationState.WORKING)
        if state is not MigrationState.WORKING and self._context.runners.of_job(job.id) is not None:
            state = MigrationState.STOPPING
        trains = job.state is JobState.RUNNING
        reason = job.reason or ("trains" if trains else job.state.name.lower().replace("_", " "))
        if state is MigrationState.WORKING and not trains and self._context.admission.decision is not None:
            decision = self._context.admission.decision
            reason = reason if decision.state.trains else "; ".join(decision.reasons)
        files = await self._files(job, state)
        return MigrationAnswer(
            state=state,
            reason=reason[:REASON_LIMIT],
            trains=trains,
            step=job.step,
            total_steps=job.total_steps,
            loss=job.loss,
            trained_s=job.trained_s,
            machine=machine_kind(),
            files=files,
        )

    async def _files(self, job: Job, state: MigrationState) -> tuple[MigratedFile, ...]:
        directory = self._context.store.job_dir(job.id)
        if state is MigrationState.DONE:
            return await asyncio.to_thread(migrated_files, {RESULT: directory / RESULT}, file_hash)
        if state in (MigrationState.STOPPED, MigrationState.FAILED):
            return await asyncio.to_thread(lambda: migrated_files(tree(directory / STATE, STATE), file_hash))
        return ()

    async def _stop(self, token: str) -> MigrationAnswer:
        job = self._job(token)
        if job is None:
            await asyncio.to_thread(shutil.rmtree, self._folder(token), ignore_errors=True)
            return MigrationAnswer(state=MigrationState.UNKNOWN)
        if not job.state.is_over:
            if job.state is not JobState.PAUSED:  # so that it is not started again meanwhile
                self._context.store.save(replace(job, state=JobState.PAUSED, reason="its device takes it back"))
            runner = self._context.runners.of_job(job.id)
            if runner is not None:
                runner.leave("its device takes it back", LAST_COMMIT_S)
                return MigrationAnswer(state=MigrationState.STOPPING)
            await self._end_durably(job.id)
        return await self._look(token)

    async def _end_durably(self, job_id: int) -> None:
        """Ensure that a job never runs again; raises StoreError if the disk rejects the record."""
        self._end(job_id)
        await asyncio.to_thread(self._context.store.flush)
        if self._context.store.trouble is not None:
            raise self._context.store.trouble

    def _end(self, job_id: int) -> None:
        """Ensure that a job never runs again."""
        context = self._context
        over = replace(
            context.store.get(job_id), state=JobState.CANCELLED, reason=_GIVEN_BACK, finished_at=context.clock.wall_s()
        )
        context.store.save(over)
        context.timers.set_deadline(job_id, None)
        context.wake.set()

    async def _fetch(self, fetch: Fetch) -> MigrationAnswer:
        job = self._job(fetch.token)
        if job is None:
            return MigrationAnswer(state=MigrationState.UNKNOWN)
        looked = await self._look(fetch.token)
        if not any(file.path == fetch.path for file in looked.files):
            return _refused(f"it has no such file of the job ({looked.state.value})")
        path = self._context.store.job_dir(job.id) / fetch.path
        data = await asyncio.to_thread(read_chunk, path, fetch.offset)
        return MigrationAnswer(state=MigrationState.PART, data=data)

    async def _close(self, client: PeerClient, token: str) -> MigrationAnswer:
        job = self._job(token)
        if job is not None:
            if not job.state.is_over:
                await self._end_durably(job.id)
            runner = self._context.runners.of_job(job.id)
            if runner is not None:
                runner.cancel()
                return MigrationAnswer(state=MigrationState.STOPPING)
            self._context.store.forget(job.id)
            self._context.peers.audit(f"{client.name}: its job is no longer here (it was job {job.id})")
        await asyncio.to_thread(shutil.rmtree, self._folder(token), ignore_errors=True)
        return MigrationAnswer(state=MigrationState.CLOSED)

    # --- files

    def _job(self, token: str) -> Job | None:
        jobs = self._context.store.all()
        return next((job for job in jobs if job.spec.guest is not None and job.spec.guest.token == token), None)

    def _folder(self, token: str) -> Path:
        return self._context.settings.state_dir / FOLDER / token

    def _known(self, token: str) -> Bring | None:
        """Return the announcement under a token that is not a job yet."""
        with contextlib.suppress(OSError, MigrationMessageError, msgspec.MsgspecError):
            announced = MIGRATION_REQUESTS.decode((self._folder(token) / _ANNOUNCED).read_bytes())
            return announced if isinstance(announced, Bring) else None
        return None


def _refused(reason: str) -> MigrationAnswer:
    return MigrationAnswer(state=MigrationState.REFUSED, reason=reason[:REASON_LIMIT])


def _owner(folder: Path) -> str:
    """Return the id of the device that announced the contents of a directory; "" if unreadable."""
    try:
        return (folder / _OWNER).read_text()
    except OSError:
        return ""


def _expected(path: str) -> bool:
    return path == BUNDLE_NAME or path.startswith((f"{STATE}/", f"{DATA}/"))


def _bundle_number(known: Bring) -> int:
    return next(number for number, file in enumerate(known.files) if file.path == BUNDLE_NAME)


def _mover(known: Bring, folder: Path) -> Callable[[Path], None]:
    """Return a function that durably moves the received files into the directory of a new job."""

    def move(directory: Path) -> None:
        for number, file in enumerate(known.files):
            source, target = folder / str(number), directory / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.nbytes:
                source.rename(target)
            else:
                target.touch()
            sync_directory(target)
        for place in {path for path in directory.rglob("*") if path.is_dir()} | {directory}:
            sync_directory(place)

    return move
