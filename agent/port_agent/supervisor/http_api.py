"""The control interface: HTTP/1.1 and JSON over a Unix socket that only the owner and a group may use.

Version 1 is below /v1. `/metrics` is also served on a local TCP port if this is configured. Discovery of other
agents (agent/port_agent/peers) only announces which devices exist; paired devices use a separate port, which
knows them by certificate.
"""

import asyncio
import grp
import os
import pwd
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from port_agent.control.http import (
    SOCKET_NAME,
    HttpError,
    HttpRequest,
    HttpResponse,
    error_response,
    json_response,
    peer_of,
)
from port_agent.control.http_answers import API_VERSION
from port_agent.control.listener import Listener
from port_agent.control.requests import (
    FederationStart,
    JobChange,
    PairingRequest,
    PauseRequest,
    RecallRequest,
    RunNowRequest,
    UnpairingRequest,
    WrongAnswer,
    decode_control_request,
    job_spec,
    solving_seconds,
)
from port_agent.jobs.job import JobNotFoundError, JobRequestError
from port_agent.jobs.store import StoreError
from port_agent.peers.connection.messages import ANSWER_LIMIT_BYTES, QUESTION_LIMIT_BYTES
from port_agent.peers.exchange.answers import NotAnsweredError, Topic
from port_agent.peers.pairing.code import LIFETIME_S, read_code
from port_agent.supervisor.attached_boards import AttachedBoards
from port_agent.supervisor.peers.peer_fleet import ANY_PEER
from port_agent.supervisor.service import BUNDLE_NAME, MeterUnavailableError, Service
from port_agent.system.directory_handle import DirectoryHandle
from port_agent.system.prometheus import CONTENT_TYPE
from port_agent.worker.attach import ATTACH_PATH, JOB_HEADER, UPGRADE, read_request
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes, shown

_TEXT = "text/plain; charset=utf-8"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,200}")
_COUNT = re.compile("[0-9]{1,9}")
_MOMENT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")
_TOKEN_BYTES = 16
_SHARED = r"/v1/shared/(costs|plan)/([0-9a-f]{64})"
_TOKEN = re.compile(rf"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")

MAX_CLIENTS = 48
"""Largest number of connections at once: commands, pages and followed logs of a few users. Each holds up to 40 kB and a
descriptor."""
_GONE_S = 0.5
"""Seconds between checks whether the client still waits for another device's answer; Ctrl-C ends the solver there."""
MAX_SCRAPERS = 8
"""Largest number of connections to the metrics port, which every user of this machine may open."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Location of the control socket, and who may use it.

    `metrics_listen` is host and port of `/metrics`, or None.
    """

    runtime_dir: Path
    state_dir: Path
    group: str | None = None
    metrics_listen: tuple[str, int] | None = None


class ControlServer:
    """The control interface of one supervisor."""

    def __init__(self, service: Service, settings: ServerSettings, report: Callable[[str], None]) -> None:
        """`report` receives problems with a setting; the server continues without that setting."""
        self._service, self._settings, self._report = service, settings, report
        self._boards = AttachedBoards()
        self._listeners: list[Listener] = []
        self._path = settings.runtime_dir / SOCKET_NAME
        self._routes = [(method, re.compile(pattern), action) for method, pattern, action in self._table()]

    async def start(self) -> None:
        """Start listening; raises OSError if the socket cannot be created."""
        self._path.unlink(missing_ok=True)  # we hold the instance lock, so this is a dead daemon's
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o117)
        try:
            sock.bind(str(self._path))
        except OSError:
            sock.close()
            raise
        finally:
            os.umask(before)
        if self._settings.group is not None:
            try:
                os.chown(self._path, -1, grp.getgrnam(self._settings.group).gr_gid)
            except (KeyError, PermissionError) as error:
                self._report(f"control.group: the socket cannot be given to {self._settings.group!r}: {error}")
        self._listeners.append(Listener(sock, self._handle, self._refuse, most=MAX_CLIENTS))
        if self._settings.metrics_listen is not None:
            self._serve_metrics(*self._settings.metrics_listen)

    def _serve_metrics(self, host: str, port: int) -> None:
        """Serve /metrics on a local port.

        A port that is in use becomes a health item, and does not prevent training.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, port), family=family)
        except OSError as error:
            self._report(f"metrics.listen: cannot listen on {host}:{port}: {error.strerror}")
        else:
            listener = Listener(sock, self._handle_metrics_only, lambda writer: "", most=MAX_SCRAPERS)
            self._listeners.append(listener)

    async def stop(self) -> None:
        """Stop listening and remove the socket."""
        for listener in self._listeners:
            listener.close()
        self._path.unlink(missing_ok=True)

    def _refuse(self, writer: asyncio.StreamWriter) -> str:
        """Return why this peer is rejected: it is neither root, nor our user, nor in the socket's group."""
        peer = peer_of(writer.get_extra_info("socket"))
        if peer.uid in (0, os.geteuid()):
            return ""
        allowed = self._path.stat().st_gid
        if allowed in _groups_of(peer.uid, peer.gid):
            return ""
        return f"user {peer.uid} is not in the group {_group_name(allowed)} that may use this agent"

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        for method, pattern, action in self._routes:
            match = pattern.fullmatch(request.path)
            if match and method == request.method:
                return await self._call(action, request, match)
        if any(pattern.fullmatch(request.path) for _, pattern, _ in self._routes):
            raise HttpError(405, f"{request.method} is not allowed on {request.path}")
        raise HttpError(404, f"there is nothing at {request.path}")

    async def _call(
        self, action: Callable[..., Awaitable[HttpResponse]], request: HttpRequest, match: re.Match[str]
    ) -> HttpResponse:
        try:
            return await action(request, *match.groups())
        except HttpError:
            raise
        except StoreError as error:
            return error_response(507, error)
        except (JobNotFoundError, NotAnsweredError) as error:
            return error_response(404, error)
        except JobRequestError as error:
            return error_response(409, error)
        except MeterUnavailableError as error:
            return error_response(503, error)
        except PortError as error:
            return error_response(400, error)
        except OSError as error:
            return error_response(507, StoreError(self._settings.state_dir, error.strerror or str(error)))

    async def _handle_metrics_only(self, request: HttpRequest) -> HttpResponse:
        if (request.method, request.path) != ("GET", "/metrics"):
            raise HttpError(404, "only /metrics is served here")
        return await self._metrics(request)

    def _table(self) -> list[tuple[str, str, Callable[..., Awaitable[HttpResponse]]]]:
        job = r"/v1/jobs/([a-z0-9._-]+)"
        return [
            ("GET", "/v1/status", self._status),
            ("GET", "/v1/health", self._health),
            ("GET", "/v1/why", self._why),
            ("GET", "/v1/jobs", self._jobs),
            ("GET", "/v1/energy", self._energy),
            ("GET", "/v1/peers", self._peers),
            ("POST", "/v1/pairing", self._pair),
            ("GET", "/v1/pairing", self._pairing_outcome),
            ("POST", "/v1/pairing/stop", self._stop_pairing),
            ("POST", "/v1/unpair", self._unpair),
            ("POST", "/v1/peers/cut", self._cut_off),
            ("GET", _SHARED, self._ask_shared),
            ("PUT", _SHARED, self._share),
            ("PUT", r"/v1/solve/([0-9a-f]{64})", self._ask_solving),
            ("GET", "/v1/federations", self._federations),
            ("POST", "/v1/federations", self._federate),
            ("POST", r"/v1/federations/([a-z0-9._-]+)/stop", self._stop_federation),
            ("POST", r"/v1/federations/([a-z0-9._-]+)/leave", self._leave_federation),
            ("POST", "/v1/jobs", self._submit),
            ("POST", "/v1/submissions/check", self._check_submission),
            ("POST", ATTACH_PATH, self._attach),
            ("GET", job, self._job),
            ("GET", f"{job}/logs", self._logs),
            ("GET", f"{job}/result", self._result),
            ("POST", f"{job}/pause", self._pause_job),
            ("POST", f"{job}/resume", self._resume_job),
            ("POST", f"{job}/run-now", self._run_now),
            ("POST", f"{job}/cancel", self._cancel_job),
            ("POST", f"{job}/change", self._change_job),
            ("POST", f"{job}/recall", self._recall_job),
            ("PUT", "/v1/uploads", self._upload),
            ("PUT", r"/v1/inbox/([a-z0-9._-]+)/([^/]+)", self._feed),
            ("POST", "/v1/pause", self._pause),
            ("POST", "/v1/resume", self._resume),
            ("POST", "/v1/reload", self._reload),
            ("POST", "/v1/doctor", self._doctor),
            ("GET", "/metrics", self._metrics),
        ]

    # --- looking

    async def _status(self, request: HttpRequest) -> HttpResponse:
        found = {
            "mcus": await self._boards.newest(),
            "peers": self._service.peer_rows(),
            "paired": self._service.other_devices.fleet.rows(),
        }
        return json_response(self._service.status().as_json() | found)

    async def _why(self, request: HttpRequest) -> HttpResponse:
        text = request.query.get("since")
        if text is not None and not _MOMENT.fullmatch(text):
            raise HttpError(400, f"since={shown(text)} is not a valid time; give seconds since 1970")
        entries = await self._service.why(None if text is None else float(text))
        rows = [{"at": entry.at, "text": entry.text, "codes": entry.codes} for entry in entries]
        return json_response({"v": API_VERSION, "entries": rows})

    async def _health(self, request: HttpRequest) -> HttpResponse:
        return json_response({"v": API_VERSION, "health": self._health_rows()})

    def _health_rows(self) -> list[dict[str, object]]:
        return [item.as_json() for item in self._service.health()]

    async def _jobs(self, request: HttpRequest) -> HttpResponse:
        jobs = self._service.jobs(with_all_over=request.query.get("all") == "1")
        return json_response({"v": API_VERSION, "jobs": [asdict(job) for job in jobs]})

    async def _job(self, request: HttpRequest, name: str) -> HttpResponse:
        job = await self._service.job(name)
        led = next((one for one in self._service.other_devices.memberships if one["job"] == job.job.id), None)
        return json_response({**job.as_json(), "federation": led})

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, self._service.metrics().encode(), CONTENT_TYPE)

    async def _energy(self, request: HttpRequest) -> HttpResponse:
        return json_response({"v": API_VERSION, **await self._service.energy_report(request.query)})

    async def _peers(self, request: HttpRequest) -> HttpResponse:
        return json_response({"v": API_VERSION, **self._service.peers()})

    async def _logs(self, request: HttpRequest, name: str) -> HttpResponse:
        lines = request.query.get("lines", "200")
        if not _COUNT.fullmatch(lines):
            raise HttpError(400, f"lines={shown(lines)} is not a valid number of lines; give up to 9 digits")
        if request.query.get("follow") != "1":
            return HttpResponse(200, self._service.log(name, int(lines)).encode(), _TEXT)
        return HttpResponse(200, b"", _TEXT, _encoded(self._service.follow_log(name, int(lines))))

    async def _result(self, request: HttpRequest, name: str) -> HttpResponse:
        return HttpResponse(200, b"", "application/octet-stream", _chunks(await self._service.result(name)))

    async def _doctor(self, request: HttpRequest) -> HttpResponse:
        fields = await request.json()
        checks = [check.as_json() for check in await self._service.examine(flash_test=fields.get("flash") is not False)]
        return json_response({"v": API_VERSION, "checks": checks, "health": self._health_rows()})

    # --- acting

    async def _submit(self, request: HttpRequest) -> HttpResponse:
        fields = await request.json()
        before = await self._service.submitted(str(fields.get("submission", "")))
        if before is not None:
            return json_response(before.as_json())
        token, upload = fields.get("upload"), None
        if token is not None:
            upload = self._service.upload(str(token)) if _TOKEN.fullmatch(str(token)) else None
            if upload is None:
                raise HttpError(400, f"there is no upload {token!r}; send the bundle to PUT /v1/uploads first")
        spec = job_spec(fields, BUNDLE_NAME if upload is not None else None)
        return json_response((await self._service.submit(spec, upload, request.peer)).as_json(), 201)

    async def _check_submission(self, request: HttpRequest) -> HttpResponse:
        """Check a submission before its bundle is sent. `bytes`: length of the bundle; None if there is none."""
        fields = await request.json()
        length = fields.pop("bytes", None)
        if length is not None and not (isinstance(length, int) and length >= 0):
            raise HttpError(400, f"bytes is {shown(str(length))}, which is not a valid file size")
        self._service.check_submission(job_spec(fields, None if length is None else BUNDLE_NAME))
        if length is not None:
            with self._service.uploads() as uploads:
                check_free(uploads, length, self._service.kept_free_bytes)
        return json_response({"v": API_VERSION})

    async def _attach(self, request: HttpRequest) -> HttpResponse:
        if request.peer is None:
            raise HttpError(403, "a program attaches over the control socket")
        wanted = read_request(await request.json_text())
        job, converse = await self._service.attach(wanted, request.peer)
        headers = {"Connection": "Upgrade", "Upgrade": UPGRADE, JOB_HEADER: f"{job.id} {job.spec.name}"}
        return HttpResponse(101, headers=headers, takes_over=converse)

    async def _upload(self, request: HttpRequest) -> HttpResponse:
        token = _new_token()
        with self._service.uploads() as uploads:
            await _receive(request, uploads, token, self._service.kept_free_bytes)
        return json_response({"v": API_VERSION, "upload": token, "bytes": request.consumed}, 201)

    async def _feed(self, request: HttpRequest, name: str, file: str) -> HttpResponse:
        if not _FILE_NAME.fullmatch(file):
            raise HttpError(400, f"{file!r} is not a valid plain file name")
        with self._service.inbox(name) as inbox:
            arriving = f".{_new_token()}.part"
            await _receive(request, inbox, arriving, self._service.kept_free_bytes)
            inbox.rename(arriving, file)
        return json_response({"v": API_VERSION, "file": str(inbox.path / file), "bytes": request.consumed}, 201)

    async def _pause_job(self, request: HttpRequest, name: str) -> HttpResponse:
        self._check_owner(request, name)
        return json_response(asdict(await self._service.pause_job(name)))

    async def _resume_job(self, request: HttpRequest, name: str) -> HttpResponse:
        self._check_owner(request, name)
        return json_response(asdict(await self._service.resume_job(name)))

    async def _run_now(self, request: HttpRequest, name: str) -> HttpResponse:
        self._check_owner(request, name)
        for_s = decode_control_request(await request.json(), RunNowRequest).for_s
        return json_response(asdict(await self._service.run_now(name, for_s)))

    async def _cancel_job(self, request: HttpRequest, name: str) -> HttpResponse:
        self._check_owner(request, name)
        return json_response(asdict(await self._service.cancel_job(name)))

    async def _change_job(self, request: HttpRequest, name: str) -> HttpResponse:
        self._check_owner(request, name)
        change = decode_control_request(await request.json(), JobChange)
        return json_response(asdict(await self._service.change_job(name, change)))

    async def _recall_job(self, request: HttpRequest, name: str) -> HttpResponse:
        self._check_owner(request, name)
        force = decode_control_request(await request.json(), RecallRequest).force
        return json_response(asdict(await self._service.recall_job(name, force=force)))

    def _check_owner(self, request: HttpRequest, name: str) -> None:
        """Raise HttpError unless the peer may control this job: a program or fine-tuning of a
        user belongs to that user.
        """
        owner = self._service.owner(name)
        if owner is None or (request.peer is not None and request.peer.uid in (0, os.geteuid(), owner)):
            return
        raise HttpError(
            403, f"job {name} belongs to user {owner}; only that user, this agent's user and root may control it"
        )

    async def _pause(self, request: HttpRequest) -> HttpResponse:
        until = await self._service.pause_all(decode_control_request(await request.json(), PauseRequest).for_s)
        return json_response({"v": API_VERSION, "paused_until": until})

    async def _resume(self, request: HttpRequest) -> HttpResponse:
        await self._service.resume_all()
        return json_response({"v": API_VERSION})

    async def _pair(self, request: HttpRequest) -> HttpResponse:
        wanted, peers = decode_control_request(await request.json(), PairingRequest), self._service.other_devices
        if wanted.code is None:
            return json_response({"v": API_VERSION, **await peers.show_code(wanted.lifetime_s or LIFETIME_S)}, 201)
        name, address = await peers.type_code(read_code(wanted.code), wanted.host, wanted.port)
        return json_response({"v": API_VERSION, "name": name, "address": address}, 201)

    async def _pairing_outcome(self, request: HttpRequest) -> HttpResponse:
        return json_response({"v": API_VERSION, **await self._service.other_devices.pairing_outcome()})

    async def _stop_pairing(self, request: HttpRequest) -> HttpResponse:
        self._service.other_devices.stop_pairing()
        return json_response({"v": API_VERSION})

    async def _unpair(self, request: HttpRequest) -> HttpResponse:
        wanted = decode_control_request(await request.json(), UnpairingRequest)
        name = await self._service.other_devices.unpair(wanted.device)
        return json_response({"v": API_VERSION, "name": name})

    async def _cut_off(self, request: HttpRequest) -> HttpResponse:
        accused = decode_control_request(await request.json(), WrongAnswer)
        self._service.other_devices.fleet.cut(accused.device, accused.reason)
        return json_response({"v": API_VERSION})

    async def _federations(self, request: HttpRequest) -> HttpResponse:
        peers = self._service.other_devices
        return json_response(
            {"v": API_VERSION, "federations": peers.federations.rows(), "memberships": peers.memberships}
        )

    async def _federate(self, request: HttpRequest) -> HttpResponse:
        wanted = decode_control_request(await request.json(), FederationStart)
        return json_response(
            {"v": API_VERSION, **self._service.other_devices.federations.start(wanted.job, wanted.settings)}, 201
        )

    async def _leave_federation(self, request: HttpRequest, name: str) -> HttpResponse:
        job = await self._service.other_devices.federated_jobs.leave(name)
        return json_response({"v": API_VERSION, "job": job.id, "name": job.spec.name})

    async def _stop_federation(self, request: HttpRequest, name: str) -> HttpResponse:
        return json_response({"v": API_VERSION, **await self._service.other_devices.federations.stop_leading(name)})

    async def _ask_shared(self, request: HttpRequest, topic: str, name: str) -> HttpResponse:
        return await self._asked(request, Topic(topic), name)

    async def _share(self, request: HttpRequest, topic: str, name: str) -> HttpResponse:
        content = await _content(request, ANSWER_LIMIT_BYTES)
        await self._service.other_devices.answers.keep(Topic(topic), name, content)
        return json_response({"v": API_VERSION, "bytes": len(content)}, 201)

    async def _ask_solving(self, request: HttpRequest, name: str) -> HttpResponse:
        problem = await _content(request, QUESTION_LIMIT_BYTES)
        return await self._asked(request, Topic.SOLVE, name, problem, solving_seconds(request.query.get("seconds", "")))

    async def _asked(
        self, request: HttpRequest, topic: Topic, name: str, problem: bytes = b"", seconds: float = 0.0
    ) -> HttpResponse:
        fleet = self._service.other_devices.fleet
        asking = asyncio.create_task(fleet.ask(request.query.get("on", ANY_PEER), topic, name, problem, seconds))
        try:
            while not (await asyncio.wait({asking}, timeout=_GONE_S))[0]:
                if request.reader.at_eof():
                    raise HttpError(400, "the client no longer waits for the answer")
            device, content = asking.result()
        finally:
            asking.cancel()
        return json_response({"v": API_VERSION, "device": str(device.id), "name": device.name, "content": content})

    async def _reload(self, request: HttpRequest) -> HttpResponse:
        return json_response({"v": API_VERSION, **asdict(self._service.reload())})


async def _receive(request: HttpRequest, directory: DirectoryHandle, name: str, kept_free_bytes: int) -> None:
    """Write a request's body durably to a new file.

    If the body ends early or would use reserved space, no file remains.
    """
    check_free(directory, request.length, kept_free_bytes)
    file = directory.create(name)
    whole = False
    try:
        with file:
            async for chunk in request.body():
                await asyncio.to_thread(file.write, chunk)  # a full write-back cache would hold up the loop
                check_free(directory, request.length - request.consumed, kept_free_bytes)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        whole = True
    finally:
        if not whole:  # also if the server stops meanwhile
            directory.remove(name)


def check_free(directory: DirectoryHandle, length: int, kept_free_bytes: int) -> None:
    """Raise HttpError if `length` more bytes would use reserved space.

    Other requests may be writing at the same time.
    """
    disk = os.fstatvfs(directory.descriptor)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_files and not disk.f_favail:
        raise HttpError(507, "no more files (inodes) can be created on the agent's disk; delete small files there")
    if free - length < kept_free_bytes:
        raise HttpError(
            507,
            f"{format_bytes(length)} do not fit: {format_bytes(free)} are free and {format_bytes(kept_free_bytes)} "
            "must stay free ([storage] min_free); delete old jobs or other files",
        )


async def _content(request: HttpRequest, limit_bytes: int) -> bytes:
    """Return the body of a request; raises HttpError if there is none, or if it is too long."""
    if not 0 < request.length <= limit_bytes:
        raise HttpError(413, f"{request.length} bytes; send 1 to {limit_bytes}")
    return b"".join([chunk async for chunk in request.body()])


def _new_token() -> str:
    return os.urandom(_TOKEN_BYTES).hex()


async def _encoded(texts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    async for text in texts:
        yield text.encode()


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 16):
            yield chunk


def _groups_of(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
