"""The live page: a small HTTP server on localhost that serves the agent's state.

It shows the state, and accepts three actions: not now, resume, run this job now. Every request needs the key in the
address printed at the start, sent as a header. So neither other users of this machine nor pages of other sites can use
it. The page's own files need none.
"""

import re
import secrets
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from port_agent.dashboard.page import static_text
from port_planner.base.errors import PortError

_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
_FILES = ("uPlot.min.css", "page.css", "uPlot.iife.min.js", "charts.js", "dashboard.js")
QUESTIONS = {"/api/status": "/v1/status", "/api/jobs": "/v1/jobs", "/api/why": "/v1/why"}
"""The page's queries, and the agent's addresses that answer them."""
NOT_NOW_S = 2 * 3600.0
WISHES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "/api/not-now": ("/v1/pause", {"for_s": NOT_NOW_S}),
    "/api/resume": ("/v1/resume", {}),
}
"""The page's actions, and the agent's requests for them."""
RUN_NOW = re.compile(r"/api/run-now/(\d{1,18})")
ENERGY = "/api/energy"
"""Path at which the page requests figures of the ledger."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_CONNECTIONS = 32
"""Largest number of connections. A browser opens six; a silent one occupies a thread for at most half a minute."""
_LOCAL_NAMES = ("127.0.0.1", "localhost")


class DashboardError(PortError):
    """The page cannot be served."""


class StatusClient(Protocol):
    """What the page needs of the agent's control client."""

    def get(self, path: str) -> Any:
        """Return the JSON at `path`; raise `PortError` if the agent does not answer."""

    def post(self, path: str, **fields: object) -> Any:
        """Send a JSON request and return its answer; raise `PortError` if the agent does not answer."""


EnergyReader = Callable[[Mapping[str, str]], Mapping[str, object]]
"""Gives the energy report for a query such as {"since": "1760000000"}, as plain values; raises `PortError`."""


class Dashboard:
    """The live page of one agent."""

    def __init__(self, client: StatusClient, energy: EnergyReader, port: int) -> None:
        """Listen on localhost at `port`, 0 for a free one; raises `DashboardError` if it is taken."""
        self.key = secrets.token_urlsafe(18)
        self._client = client
        self._energy = energy
        try:
            self._server = _PageServer(("127.0.0.1", port), _handler(self))
        except (OSError, OverflowError) as error:
            raise DashboardError(f"cannot listen on port {port} ({error}); give another one with --port") from error

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address to open; the key follows the #, which browsers never send."""
        return f"http://127.0.0.1:{self.port}/#key={self.key}"

    def serve_forever(self) -> None:
        """Answer requests until `stop`."""
        self._server.serve_forever()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()

    def figures(self, path: str, query: dict[str, str]) -> object:
        """Return the answer to one of the page's queries; raise `PortError` if there is none."""
        return self._energy(query) if path == ENERGY else self._client.get(QUESTIONS[path])

    def wish(self, path: str) -> Any:
        """Execute one of the page's actions and return the agent's answer; None for an unknown path.

        Raises `PortError`.
        """
        if path in WISHES:
            target, fields = WISHES[path]
            return self._client.post(target, **fields)
        job = RUN_NOW.fullmatch(path)
        return None if job is None else self._client.post(f"/v1/jobs/{job[1]}/run-now", for_s=None)


class _PageServer(ThreadingHTTPServer):
    """Uses a thread for each connection, at most `MAX_CONNECTIONS`, because every user of this machine may connect."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects; other errors are shown as usual."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    dashboard: Dashboard
    """Dashboard that answers the requests; set by `_handler`."""
    server_version = "port-agent"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # also the answer to a line that names none has a status
    timeout = 30

    def do_GET(self) -> None:
        """Answer one request; the name is set by http.server."""
        path, _, query = self.path.partition("?")
        if not self._from_here():
            self._refuse_host()
        elif path == "/":
            self._send_file("dashboard.html")
        elif path.startswith("/static/") and path.removeprefix("/static/") in _FILES:
            self._send_file(path.removeprefix("/static/"))
        elif not self._has_key():
            self._refuse_key()
        elif path in QUESTIONS or path == ENERGY:
            self._answer(path, lambda: self.dashboard.figures(path, dict(parse_qsl(query))))
        else:
            self._answer(path, lambda: None)

    def do_POST(self) -> None:
        """Execute one action. Its body is not read, because the path is enough."""
        self.close_connection = True
        if not self._from_here():
            self._refuse_host()
        elif not self._has_key():
            self._refuse_key()
        else:
            self._answer(self.path, lambda: self.dashboard.wish(self.path))

    def _refuse_host(self) -> None:
        self._send(HTTPStatus.FORBIDDEN, {"error": "this page is only served to localhost"})

    def _refuse_key(self) -> None:
        self._send(HTTPStatus.UNAUTHORIZED, {"error": "open the address that `port-agent dashboard` printed"})

    def _from_here(self) -> bool:
        """Return whether the request was addressed to this machine: a foreign name that resolves
        here belongs to another site.
        """
        return self.headers.get("Host", "").partition(":")[0] in _LOCAL_NAMES

    def _has_key(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return secrets.compare_digest(given.encode(), self.dashboard.key.encode())

    def _answer(self, path: str, ask: Callable[[], object | None]) -> None:
        """Send the result of `ask`; None means that nothing is at `path`."""
        try:
            found = ask()
        except PortError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)})
            return
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"there is nothing at {path}"})
        else:
            self._send(HTTPStatus.OK, found)

    def _send(self, status: HTTPStatus, body: object) -> None:
        self._send_bytes(status, msgspec.json.encode(body), "application/json")

    def _send_file(self, name: str) -> None:
        kind = _TYPES[name[name.rindex(".") :]]
        self._send_bytes(HTTPStatus.OK, static_text(name).encode(), f"{kind}; charset=utf-8")

    def _send_bytes(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Keep the terminal quiet."""


def _handler(dashboard: Dashboard) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers the requests of one page."""
    return type("Handler", (_Handler,), {"dashboard": dashboard})


def open_in_browser(url: str) -> bool:
    """Open `url` in the user's browser; return whether one could be started."""
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
