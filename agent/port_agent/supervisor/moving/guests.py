"""Jobs of paired devices that are trained here: taken where the owner of this device and the policy allow it, and given back.

What is received lies in `moving/TOKEN` until it is whole and the owner hands it over; then it is a job like any other, last in line.
Everything is read off the disk, so that a restart goes on where it was; every request may come again.
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
from port_agent.jobs.model import Guest, Job, JobSpec, JobState, check_spec, name_like
from port_agent.peers.decoding import REASON_LIMIT
from port_agent.peers.exchange.answers import Asker
from port_agent.peers.moving.requests import (
    MOVE_ANSWERS,
    MOVE_REQUESTS,
    Begin,
    Bring,
    Close,
    Fetch,
    Look,
    MoveAnswer,
    MovedFile,
    MoveMessageError,
    MoveState,
    Offer,
    Part,
    Request,
    Stop,
)
from port_agent.peers.transfer import FileTransfer, file_hash, read_part
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.context import Core
from port_agent.supervisor.dispatch import granted_limits, surroundings
from port_agent.supervisor.job.runner import LAST_COMMIT_S
from port_agent.supervisor.job.worker_kinds import LOOKED_FOR
from port_agent.supervisor.moving.job_files import (
    DATA,
    RESULT,
    STATE,
    free_bytes,
    machine_kind,
    moved_files,
    tree,
)
from port_agent.supervisor.moving.paces import paces
from port_agent.supervisor.service import BUNDLE_NAME
from port_agent.system.atomic_file import sync_directory, write_atomically
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes

FOLDER = "moving"
_ANNOUNCED = "announced"
_STALE_S = 3600.0
"""What is not gone on with for so long gives way to another job."""
_LAST_IN_LINE = -100
_ROOM = 2
"""Times the size of what comes: checkpoints and the result are as large as the weights in the bundle."""
_WORK = (JobState.QUEUED, JobState.RUNNING, JobState.BACKOFF)
"""A device with a job in one of these has work of its own."""
_GIVEN_BACK = "given back to its device"


class Guests:
    """Answers the devices whose jobs come here."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._turn = asyncio.Lock()
        """One request after the other: they are of one job, or refused."""

    async def answer(self, asker: Asker, content: bytes) -> bytes:
        """Return the answer to a request, whatever it holds."""
        try:
            request = MOVE_REQUESTS.decode(content)
        except MoveMessageError as error:
            self._core.peers.audit(f"{asker.name}: {error}")
            return MOVE_ANSWERS.encode(_refused(str(error)))
        working = asyncio.create_task(self._respond(asker, request))
        return MOVE_ANSWERS.encode(
            await asyncio.shield(working)
        )  # what was begun is ended, also where the connection is gone

    def drop_unpaired(self, paired: Set[str]) -> None:
        """End the jobs of devices that are trusted no more; `paired` are the ids of those that are."""
        for job in self._core.store.all():
            if job.spec.guest is None or job.spec.guest.device in paired:
                continue
            if not job.state.is_over:
                self._end(job.id)
            elif self._core.runners.of_job(job.id) is None:
                self._core.store.forget(job.id)

    async def _respond(self, asker: Asker, request: Request) -> MoveAnswer:
        async with self._turn:
            try:
                return await self._act(asker, request)
            except (OSError, PortError) as error:
                return _refused(error.strerror or str(error) if isinstance(error, OSError) else str(error))

    async def _act(self, asker: Asker, request: Request) -> MoveAnswer:
        job = self._job(request.token)
        if job is not None and job.spec.guest is not None and job.spec.guest.device != asker.id:
            return MoveAnswer(state=MoveState.UNKNOWN)
        match request:
            case Offer():
                return self._offered(asker, request)
            case Bring():
                return await self._announced(asker, request)
            case Part():
                return await self._take(request)
            case Begin():
                return await self._begin(asker, request)
            case Look():
                return await self._look(request.token)
            case Stop():
                return await self._stop(request.token)
            case Fetch():
                return await self._fetch(request)
            case Close():
                return await self._close(asker, request.token)

    # --- whether it comes

    def _offered(self, asker: Asker, offer: Offer) -> MoveAnswer:
        reason = self._objection(offer.nbytes) or self._unfit(offer)
        if reason:
            return _refused(reason)
        pace, joules_pace = paces(self._core, asker.id)
        return MoveAnswer(state=MoveState.WELCOME, pace=pace, joules_pace=joules_pace)

    def _objection(self, nbytes: int) -> str:
        """Return why no job is taken now, or nothing."""
        core, decision = self._core, self._core.admission.decision
        if not core.config.options.take_jobs:
            return "it takes no jobs (take_jobs = true under [peers] there would)"
        if decision is None:
            return "it has just started"
        if not decision.state.trains:
            return "; ".join(decision.reasons)
        if core.admission.facts.metered is Answer.YES:
            return "its network is metered"
        if core.runners.busy() or any(job.state in _WORK for job in core.store.all()):
            return "it has work of its own"
        return self._no_room(_ROOM * nbytes)

    def _no_room(self, nbytes: int) -> str:
        kept = self._core.config.policy.min_free_disk_bytes
        free = free_bytes(self._core.settings.state_dir) - kept
        return f"its disk has {format_bytes(max(0, free))} to give, not {format_bytes(nbytes)}" if free < nbytes else ""

    def _unfit(self, offer: Offer) -> str:
        core = self._core
        devices = core.admission.facts.devices
        if offer.device_kind in LOOKED_FOR and (devices is None or offer.device_kind not in devices):
            return f"it has no {offer.device_kind} device"
        memory = surroundings(core, self._limits()).memory_bytes
        if memory is not None and offer.least_bytes > memory:
            return f"it grants {format_bytes(memory)} of memory; the job needs {format_bytes(offer.least_bytes)}"
        if offer.machine and offer.machine != machine_kind():
            return "the job began on another kind of machine, whose bits it keeps"
        return ""

    def _limits(self) -> ResourceLimits:
        decision = self._core.admission.decision
        policy = self._core.config.policy
        return policy.not_in_use if decision is None else granted_limits(policy, decision.state)

    # --- how it comes

    async def _announced(self, asker: Asker, bring: Bring) -> MoveAnswer:
        if self._job(bring.token) is not None:
            return MoveAnswer(state=MoveState.WORKING)
        folder, nbytes = self._folder(bring.token), sum(file.nbytes for file in bring.files)
        known = self._known(bring.token)
        if known is not None and known.files == bring.files:
            return self._received(known)
        reason = self._objection(nbytes) or await asyncio.to_thread(self._other_comes, bring.token)
        if not reason and [file.path for file in bring.files if file.path == BUNDLE_NAME] != [BUNDLE_NAME]:
            reason = "its files are not those of a job: one bundle"
        if not reason and not all(_expected(file.path) for file in bring.files):
            reason = "its files are not those of a job: beside the bundle there are state and data"
        if reason:
            return _refused(reason)

        def begin_anew() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)
            write_atomically(folder / _ANNOUNCED, MOVE_REQUESTS.encode(bring))

        await asyncio.to_thread(begin_anew)
        self._core.peers.audit(f"{asker.name}: its job {bring.job.name} comes, {format_bytes(nbytes)}")
        return self._received(bring)

    def _other_comes(self, token: str) -> str:
        """Return why this job has to wait for another that comes, or nothing; removes one that was given up."""
        for folder in (self._core.settings.state_dir / FOLDER).glob("*"):
            if folder.name == token:
                continue
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest < _STALE_S:
                return "it is receiving another job"
            shutil.rmtree(folder)
        return ""

    async def _take(self, part: Part) -> MoveAnswer:
        known = self._known(part.token)
        if known is None:
            return await self._look(part.token)
        transfer = self._transfer(known)
        if transfer.position == (part.file, part.offset) and part.file < len(known.files):
            reason = self._no_room(len(part.data))
            if reason:
                return _refused(reason)
            await asyncio.to_thread(transfer.files[part.file].take, part.offset, part.data)
        return self._received(known)

    async def _begin(self, asker: Asker, begin: Begin) -> MoveAnswer:
        known, folder = self._known(begin.token), self._folder(begin.token)
        if known is None or self._job(begin.token) is not None:
            return await self._look(begin.token)
        received = self._received(known)
        if received.file < len(known.files):
            return received
        if await asyncio.to_thread(self._transfer(known).verify) is not None:
            return self._received(known)
        spec = self._spec(asker, known)
        await asyncio.to_thread(self._core.seams.kinds[spec.kind].read_bundle, folder / str(_bundle_number(known)))
        store, wall_s = self._core.store, self._core.clock.wall_s()
        job = await asyncio.to_thread(store.add, spec, wall_s, _mover(known, folder))
        at = known.job
        store.save(replace(store.get(job.id), step=at.step, failed_at_step=at.step, total_steps=at.total_steps))
        store.note(wall_s, job.id, "submitted", f"came from {asker.name} at step {at.step}")
        self._core.peers.audit(f"{asker.name}: its job {known.job.name} is job {job.id} here")
        if spec.deadline_at is not None:
            self._core.timers.set_deadline(job.id, spec.deadline_at)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._core.wake.set()
        return await self._look(begin.token)

    def _spec(self, asker: Asker, known: Bring) -> JobSpec:
        job = known.job
        name = name_like(f"{name_like(job.name)[:50]}.{known.token[:8]}")
        data = DATA if any(file.path.startswith(f"{DATA}/") for file in known.files) else None
        return check_spec(
            JobSpec(
                name=name, bundle=BUNDLE_NAME, data=data, epochs=job.epochs, steps=job.steps,
                checkpoint_every=job.checkpoint_every, priority=_LAST_IN_LINE, deadline_at=job.deadline_at,
                guest=Guest(asker.name, known.token, asker.id),
            )
        )  # fmt: skip

    def _received(self, bring: Bring) -> MoveAnswer:
        number, offset = self._transfer(bring).position
        return MoveAnswer(state=MoveState.RECEIVING, file=number, offset=offset)

    def _transfer(self, bring: Bring) -> FileTransfer:
        folder = self._folder(bring.token)
        return FileTransfer([file.into(folder / str(number)) for number, file in enumerate(bring.files)])

    # --- how it fares, and goes

    async def _look(self, token: str) -> MoveAnswer:
        job = self._job(token)
        if job is None:
            known = self._known(token)
            return MoveAnswer(state=MoveState.UNKNOWN) if known is None else self._received(known)
        state = {
            JobState.FINISHED: MoveState.DONE, JobState.FAILED: MoveState.FAILED, JobState.CANCELLED: MoveState.STOPPED,
        }.get(job.state, MoveState.WORKING)  # fmt: skip
        if state is not MoveState.WORKING and self._core.runners.of_job(job.id) is not None:
            state = MoveState.STOPPING
        trains = job.state is JobState.RUNNING
        reason = job.reason or ("trains" if trains else job.state.name.lower().replace("_", " "))
        if state is MoveState.WORKING and not trains and self._core.admission.decision is not None:
            decision = self._core.admission.decision
            reason = reason if decision.state.trains else "; ".join(decision.reasons)
        files = await self._files(job, state)
        return MoveAnswer(
            state=state, reason=reason[:REASON_LIMIT], trains=trains, step=job.step, total_steps=job.total_steps,
            loss=job.loss, trained_s=job.trained_s, machine=machine_kind(), files=files,
        )  # fmt: skip

    async def _files(self, job: Job, state: MoveState) -> tuple[MovedFile, ...]:
        directory = self._core.store.job_dir(job.id)
        if state is MoveState.DONE:
            return await asyncio.to_thread(moved_files, {RESULT: directory / RESULT}, file_hash)
        if state in (MoveState.STOPPED, MoveState.FAILED):
            return await asyncio.to_thread(lambda: moved_files(tree(directory / STATE, STATE), file_hash))
        return ()

    async def _stop(self, token: str) -> MoveAnswer:
        job = self._job(token)
        if job is None:
            await asyncio.to_thread(shutil.rmtree, self._folder(token), ignore_errors=True)
            return MoveAnswer(state=MoveState.UNKNOWN)
        if not job.state.is_over:
            if job.state is not JobState.PAUSED:  # so that it is not started again meanwhile
                self._core.store.save(replace(job, state=JobState.PAUSED, reason="its device takes it back"))
            runner = self._core.runners.of_job(job.id)
            if runner is not None:
                runner.leave("its device takes it back", LAST_COMMIT_S)
                return MoveAnswer(state=MoveState.STOPPING)
            await self._end_durably(job.id)
        return await self._look(token)

    async def _end_durably(self, job_id: int) -> None:
        """Have a job never run again; raises StoreError where the disk does not take that."""
        self._end(job_id)
        await asyncio.to_thread(self._core.store.flush)
        if self._core.store.trouble is not None:
            raise self._core.store.trouble

    def _end(self, job_id: int) -> None:
        """Have a job never run again."""
        core = self._core
        over = replace(
            core.store.get(job_id), state=JobState.CANCELLED, reason=_GIVEN_BACK, finished_at=core.clock.wall_s()
        )
        core.store.save(over)
        core.timers.set_deadline(job_id, None)
        core.wake.set()

    async def _fetch(self, fetch: Fetch) -> MoveAnswer:
        job = self._job(fetch.token)
        if job is None:
            return MoveAnswer(state=MoveState.UNKNOWN)
        looked = await self._look(fetch.token)
        if not any(file.path == fetch.path for file in looked.files):
            return _refused(f"it has no such file of the job ({looked.state.value})")
        path = self._core.store.job_dir(job.id) / fetch.path
        data = await asyncio.to_thread(read_part, path, fetch.offset)
        return MoveAnswer(state=MoveState.PART, data=data)

    async def _close(self, asker: Asker, token: str) -> MoveAnswer:
        job = self._job(token)
        if job is not None:
            if not job.state.is_over:
                await self._end_durably(job.id)
            runner = self._core.runners.of_job(job.id)
            if runner is not None:
                runner.cancel()
                return MoveAnswer(state=MoveState.STOPPING)
            self._core.store.forget(job.id)
            self._core.peers.audit(f"{asker.name}: its job is no longer here (it was job {job.id})")
        await asyncio.to_thread(shutil.rmtree, self._folder(token), ignore_errors=True)
        return MoveAnswer(state=MoveState.CLOSED)

    # --- files

    def _job(self, token: str) -> Job | None:
        jobs = self._core.store.all()
        return next((job for job in jobs if job.spec.guest is not None and job.spec.guest.token == token), None)

    def _folder(self, token: str) -> Path:
        return self._core.settings.state_dir / FOLDER / token

    def _known(self, token: str) -> Bring | None:
        """Return what was announced under a token and is not a job yet."""
        with contextlib.suppress(OSError, MoveMessageError, msgspec.MsgspecError):
            announced = MOVE_REQUESTS.decode((self._folder(token) / _ANNOUNCED).read_bytes())
            return announced if isinstance(announced, Bring) else None
        return None


def _refused(reason: str) -> MoveAnswer:
    return MoveAnswer(state=MoveState.REFUSED, reason=reason[:REASON_LIMIT])


def _expected(path: str) -> bool:
    return path == BUNDLE_NAME or path.startswith((f"{STATE}/", f"{DATA}/"))


def _bundle_number(known: Bring) -> int:
    return next(number for number, file in enumerate(known.files) if file.path == BUNDLE_NAME)


def _mover(known: Bring, folder: Path) -> Callable[[Path], None]:
    """Return what puts the files that came into the directory of a new job, durably."""

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
