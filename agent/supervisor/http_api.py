"""The control interface: HTTP/1.1 and JSON over a Unix socket that only the owner and a group may use.

Version 1 lives below /v1. `/metrics` is also served on a local TCP port if the configuration says so. Nothing
else that answers questions listens on the network; discovery of other agents (agent/peers) only says who is there.
"""

import asyncio
import contextlib
import grp
import math
import os
import pwd
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from agent.control.agent_metrics import agent_families
from agent.control.http import (
    HEADER_LIMIT_BYTES,
    SOCKET_NAME,
    HttpError,
    HttpRequest,
    HttpResponse,
    error_response,
    json_response,
    peer_of,
    serve_connection,
)
from agent.energy.metrics import meter_families
from agent.jobs.model import Job, JobRequestError
from agent.jobs.store import StoreError
from agent.supervisor.attached_boards import AttachedBoards
from agent.supervisor.context import Core
from agent.supervisor.job.log import read_log, read_more
from agent.supervisor.service import Service
from agent.system.prometheus import CONTENT_TYPE, exposition
from planner.ir.errors import PortError

FOLLOW_POLL_S = 0.5
FLUSH_PATIENCE_S = 5.0
"""How long a report waits for the newest figures to be on disk."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,200}")
_TOKEN = re.compile(r"[0-9a-f]{32}")

Route = tuple[str, re.Pattern[str], Callable[..., Awaitable[HttpResponse]]]


class ControlServer:
    """Serves one supervisor."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._service = Service(core)
        self._boards = AttachedBoards()
        self._servers: list[asyncio.Server] = []
        self._path = core.settings.runtime_dir / SOCKET_NAME
        self._uploads = core.settings.state_dir / "uploads"
        self._group = core.config.options.control_group
        self._routes = [(method, re.compile(pattern), action) for method, pattern, action in self._table()]

    async def start(self) -> None:
        """Begin to listen; raises OSError when the socket cannot be made."""
        self._path.unlink(missing_ok=True)  # we hold the instance lock, so this is a dead daemon's
        before = os.umask(0o117)
        try:
            server = await asyncio.start_unix_server(self._on_unix, str(self._path), limit=HEADER_LIMIT_BYTES)
        finally:
            os.umask(before)
        self._servers.append(server)
        if self._group is not None:
            try:
                os.chown(self._path, -1, grp.getgrnam(self._group).gr_gid)
            except (KeyError, PermissionError) as error:
                self._report_config(f"control.group: the socket cannot be given to {self._group!r}: {error}")
        if self._core.config.options.metrics_listen is not None:
            await self._serve_metrics(*self._core.config.options.metrics_listen)

    async def _serve_metrics(self, host: str, port: int) -> None:
        """Serve /metrics on a local port; one that is taken is a health item, no reason not to train."""
        try:
            server = await asyncio.start_server(self._on_tcp, host, port, limit=HEADER_LIMIT_BYTES)
        except OSError as error:
            self._report_config(f"metrics.listen: cannot listen on {host}:{port}: {error.strerror}")
        else:
            self._servers.append(server)

    def _report_config(self, reason: str) -> None:
        clock = self._core.clock
        self._core.health.report("config", clock.monotonic_s(), clock.wall_s(), reason=reason)

    async def stop(self) -> None:
        """Stop listening and remove the socket."""
        for server in self._servers:
            server.close()
        self._path.unlink(missing_ok=True)

    async def _on_unix(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve_connection(reader, writer, self._handle, self._refuse)

    async def _on_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve_connection(reader, writer, self._handle_metrics_only, lambda writer: "")

    def _refuse(self, writer: asyncio.StreamWriter) -> str:
        """Return why this peer may not speak: it is neither root, nor our user, nor in the socket's group."""
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
            raise HttpError(405, f"{request.method} is not possible on {request.path}")
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
        except JobRequestError as error:
            return error_response(404 if "there is no job" in str(error) else 409, error)
        except PortError as error:
            return error_response(400, error)
        except OSError as error:
            return error_response(507, StoreError(self._core.settings.state_dir, error.strerror or str(error)))

    async def _handle_metrics_only(self, request: HttpRequest) -> HttpResponse:
        if (request.method, request.path) != ("GET", "/metrics"):
            raise HttpError(404, "only /metrics is served here")
        return await self._metrics(request)

    def _table(self) -> list[tuple[str, str, Callable[..., Awaitable[HttpResponse]]]]:
        job = r"/v1/jobs/([a-z0-9._-]+)"
        return [
            ("GET", "/v1/status", self._status),
            ("GET", "/v1/health", self._health),
            ("GET", "/v1/jobs", self._jobs),
            ("GET", "/v1/energy", self._energy),
            ("GET", "/v1/peers", self._peers),
            ("POST", "/v1/jobs", self._submit),
            ("GET", job, self._job),
            ("GET", f"{job}/logs", self._logs),
            ("GET", f"{job}/result", self._result),
            ("POST", f"{job}/pause", self._pause_job),
            ("POST", f"{job}/resume", self._resume_job),
            ("POST", f"{job}/cancel", self._cancel_job),
            ("POST", f"{job}/change", self._change_job),
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
        found = {"mcus": await self._boards.newest(), "peers": self._core.peers.rows()}
        return json_response(self._service.status() | found)

    async def _health(self, request: HttpRequest) -> HttpResponse:
        return json_response({"v": 1, "health": self._service.health()})

    async def _jobs(self, request: HttpRequest) -> HttpResponse:
        jobs = self._core.store.all()
        if request.query.get("all") != "1":
            over = [job for job in jobs if job.state.is_over][-10:]
            jobs = [job for job in jobs if not job.state.is_over or job in over]
        return json_response({"v": 1, "jobs": [self._service.brief(job) for job in jobs]})

    async def _job(self, request: HttpRequest, name: str) -> HttpResponse:
        return json_response(await self._detail(self._core.store.find(name)))

    async def _detail(self, job: Job) -> dict[str, Any]:
        history = await asyncio.to_thread(self._core.store.history, job.id, 50)
        return self._service.detail(job, history)

    async def _done(self, job: Job) -> HttpResponse:
        """Answer a change once it is on disk."""
        await self._service.settle()
        return json_response(self._service.brief(job))

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        families = [*agent_families(self._service.status(), self._core.store.all())]
        if self._core.meter is not None:
            families += meter_families(self._core.meter)
        return HttpResponse(200, exposition(families).encode(), CONTENT_TYPE)

    async def _energy(self, request: HttpRequest) -> HttpResponse:
        from agent.energy.ledger import FILE_NAME  # a report is asked for now and then: not worth resident memory
        from agent.energy.report import report_from_query

        if self._core.meter is None:
            raise HttpError(503, "the energy meter could not be opened; see the health items")
        written = self._core.meter.flush(self._core.clock.monotonic_s())
        with contextlib.suppress(PortError, TimeoutError):  # a disk that refuses is a health item
            async with asyncio.timeout(FLUSH_PATIENCE_S):
                await asyncio.shield(asyncio.wrap_future(written))
        path = self._core.settings.state_dir / FILE_NAME
        return json_response({"v": 1} | await asyncio.to_thread(report_from_query, path, request.query))

    async def _peers(self, request: HttpRequest) -> HttpResponse:
        return json_response({"v": 1} | self._core.peers.describe())

    async def _logs(self, request: HttpRequest, name: str) -> HttpResponse:
        job = self._core.store.find(name)
        directory = self._core.store.job_dir(job.id)
        lines = request.query.get("lines", "200")
        if not lines.isdigit():
            raise HttpError(400, f"lines={lines!r} is no number")
        text, position = read_log(directory, int(lines))
        if request.query.get("follow") != "1":
            return HttpResponse(200, text.encode(), "text/plain; charset=utf-8")
        return HttpResponse(200, b"", "text/plain; charset=utf-8", self._follow(job, directory, text, position))

    async def _follow(self, job: Job, directory: Path, text: str, position: int) -> AsyncIterator[bytes]:
        yield text.encode()
        while True:
            ended = self._core.store.get(job.id).state.is_over
            text, position = read_more(directory, position)
            if text:
                yield text.encode()
            elif ended:
                return
            await asyncio.sleep(FOLLOW_POLL_S)

    async def _result(self, request: HttpRequest, name: str) -> HttpResponse:
        path = self._service.result(self._core.store.find(name))
        return HttpResponse(200, b"", "application/octet-stream", _pieces(path))

    async def _doctor(self, request: HttpRequest) -> HttpResponse:
        from agent.health.doctor import examine  # needed once in a while: not worth resident memory

        core = self._core
        fields = await request.json()
        checks = await asyncio.to_thread(
            examine, core.settings.state_dir, core.config, flash_test=fields.get("flash") is not False
        )
        health = self._service.health()
        return json_response({"v": 1, "checks": [check.as_json() for check in checks], "health": health})

    # --- acting

    async def _submit(self, request: HttpRequest) -> HttpResponse:
        fields = await request.json()
        token = fields.get("upload")
        upload = None
        if token is not None:
            upload = self._uploads / str(token)
            if not _TOKEN.fullmatch(str(token)) or not upload.is_file():
                raise HttpError(400, f"there is no upload {token!r}; send the bundle to PUT /v1/uploads first")
        job = await self._service.submit(fields, upload)
        return json_response(await self._detail(job), 201)

    async def _upload(self, request: HttpRequest) -> HttpResponse:
        token = os.urandom(16).hex()
        self._uploads.mkdir(exist_ok=True)
        await _receive(request, self._uploads / token)
        return json_response({"v": 1, "upload": token, "bytes": request.consumed}, 201)

    async def _feed(self, request: HttpRequest, name: str, file: str) -> HttpResponse:
        job = self._core.store.find(name)
        if not job.spec.waits_for_data:
            raise JobRequestError(f"job {job.label} takes no data from an inbox; submit it with --inbox", job.id)
        if not _FILE_NAME.fullmatch(file):
            raise HttpError(400, f"{file!r} is no plain file name")
        target = self._core.inboxes.create(job.spec.name) / file
        await _receive(request, target.with_name(f".{file}.part"))
        target.with_name(f".{file}.part").rename(target)
        return json_response({"v": 1, "file": str(target), "bytes": request.consumed}, 201)

    async def _pause_job(self, request: HttpRequest, name: str) -> HttpResponse:
        return await self._done(self._service.pause_job(self._core.store.find(name)))

    async def _resume_job(self, request: HttpRequest, name: str) -> HttpResponse:
        return await self._done(self._service.resume_job(self._core.store.find(name)))

    async def _cancel_job(self, request: HttpRequest, name: str) -> HttpResponse:
        return await self._done(self._service.cancel_job(self._core.store.find(name)))

    async def _change_job(self, request: HttpRequest, name: str) -> HttpResponse:
        fields = await request.json()
        changes: dict[str, Any] = {}
        priority, deadline = fields.get("priority"), fields.get("deadline_at")
        if isinstance(priority, int) and -100 <= priority <= 100:
            changes["priority"] = priority
        elif priority is not None:
            raise HttpError(400, f"priority {priority!r} is no number between -100 and 100")
        if "deadline_at" in fields:
            if deadline is not None and not isinstance(deadline, int | float):
                raise HttpError(400, f"deadline_at {deadline!r} is no Unix time")
            changes["deadline_at"] = deadline
        return await self._done(self._service.change_spec(self._core.store.find(name), **changes))

    async def _pause(self, request: HttpRequest) -> HttpResponse:
        for_s = (await request.json()).get("for_s")
        if for_s is not None and not (isinstance(for_s, int | float) and 0 < for_s < 366 * 86400):
            raise HttpError(400, f"for_s {for_s!r} is no number of seconds below a year")
        until = self._service.pause_all(float(for_s) if for_s is not None else None)
        await self._service.settle()
        return json_response({"v": 1, "paused_until": None if math.isinf(until) else until})

    async def _resume(self, request: HttpRequest) -> HttpResponse:
        self._service.resume_all()
        await self._service.settle()
        return json_response({"v": 1})

    async def _reload(self, request: HttpRequest) -> HttpResponse:
        settings, waiting = self._service.reload()
        return json_response({"v": 1, "settings": settings, "after_restart": waiting})


async def _receive(request: HttpRequest, path: Path) -> None:
    """Write a request's body to `path`, durable; a torn transfer leaves nothing behind."""
    try:
        with path.open("wb") as file:
            async for piece in request.body():
                await asyncio.to_thread(file.write, piece)  # a full write-back cache would hold up the loop
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
    except (OSError, HttpError):
        _discard(path)
        raise


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 16):
            yield piece


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
