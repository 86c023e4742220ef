"""What a Wayland compositor says of its user: to messages of the protocol as it is written, and a real KWin."""

import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.facts import wayland
from port_agent.facts.sessions import SessionHelper
from port_agent.facts.wayland import IDLE_AFTER_S, NOTIFIER, SEAT, WaylandIdle
from tests.waiting import until

OFFERS = {"wl_compositor": 1, SEAT: 7, NOTIFIER: 12}
"""Interfaces by the numbers that the compositor gives them."""


def word(*values: int) -> bytes:
    return struct.pack(f"={len(values)}I", *values)


def text(value: str) -> bytes:
    name = value.encode() + b"\0"
    return word(len(name)) + name + bytes(-len(name) % 4)


def message(sender: int, number: int, arguments: bytes = b"") -> bytes:
    return struct.pack("=IHH", sender, number, 8 + len(arguments)) + arguments


class Compositor:
    """Answers one client on a socket, by the protocol's own numbers."""

    def __init__(self, place: Path, offers: dict[str, int]) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen()
        self._offers = offers
        self.asked = b""
        """What the client sent after the list of interfaces."""
        self._thread = threading.Thread(target=self._greet, daemon=True)
        self._thread.start()

    def _greet(self) -> None:
        self._client, _ = self._listener.accept()
        assert self._client.recv(24, socket.MSG_WAITALL) == message(1, 1, word(2)) + message(1, 0, word(3))
        listed = [message(2, 0, word(number) + text(name) + word(9)) for name, number in self._offers.items()]
        self._client.sendall(b"".join(listed) + message(3, 0, word(0)) + message(1, 1, word(3)))

    def take_requests(self, size: int) -> bytes:
        self._thread.join()
        return self._client.recv(size, socket.MSG_WAITALL)

    def send(self, *messages: bytes) -> None:
        self._client.sendall(b"".join(messages))

    def end(self) -> None:
        self._client.close()
        self._listener.close()


IDLED, RESUMED = message(6, 0), message(6, 1)


@pytest.fixture
def display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-4")
    return tmp_path / "wayland-4"


def test_a_session_is_idle_since_the_compositor_said_so(display: Path) -> None:
    compositor, now_s = Compositor(display, OFFERS), [50.0]
    idle = WaylandIdle(lambda: now_s[0])
    assert idle() == 0.0, "nothing is known yet"
    bound = [
        message(2, 0, word(OFFERS[name]) + text(name) + word(1, number)) for name, number in ((SEAT, 4), (NOTIFIER, 5))
    ]
    subscribed = message(5, 1, word(6, round(IDLE_AFTER_S * 1000), 4))
    requests = b"".join([*bound, subscribed])
    assert compositor.take_requests(len(requests)) == requests
    compositor.send(message(4, 0, word(3)), IDLED[:5])  # what a seat can do, and half of a message
    assert idle() == 0.0
    compositor.send(IDLED[5:])
    assert idle() == IDLE_AFTER_S
    now_s[0] = 80.0
    assert idle() == 30.0 + IDLE_AFTER_S
    compositor.send(RESUMED)
    assert idle() == 0.0
    now_s[0] = 99.0
    assert idle() == 0.0, "somebody goes on typing"
    compositor.send(IDLED, RESUMED, IDLED)
    assert idle() == IDLE_AFTER_S
    compositor.end()
    assert idle() is None
    display.unlink()
    assert idle() is None, "nobody listens there any longer"
    restarted = Compositor(display, OFFERS)
    assert idle() == 0.0, "one that was started again is asked again"
    idle.close()
    restarted.end()


@pytest.mark.parametrize("missing", [NOTIFIER, SEAT])
def test_a_compositor_without_the_protocol_says_nothing(display: Path, missing: str) -> None:
    compositor = Compositor(display, {name: number for name, number in OFFERS.items() if name != missing})
    assert WaylandIdle()() is None
    compositor.end()


@pytest.mark.parametrize("answer", [message(1, 0, word(5, 0) + text("no such seat")), struct.pack("=IHH", 6, 0, 0)])
def test_a_compositor_that_refuses_or_babbles_is_left(display: Path, answer: bytes) -> None:
    compositor, idle = Compositor(display, OFFERS), WaylandIdle()
    assert idle() == 0.0
    compositor.send(answer)
    assert idle() is None
    compositor.end()


def test_an_x_session_has_no_compositor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert WaylandIdle()() is None


class Hand(WaylandIdle):
    """Moves KWin's pointer through a protocol of its own for tests."""

    INTERFACE = "org_kde_kwin_fake_input"

    def move(self) -> None:
        if self._connection is None:
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(f"{os.environ['XDG_RUNTIME_DIR']}/{os.environ['WAYLAND_DISPLAY']}")
            self._send(2, 0, wayland._binding(self._offered()[self.INTERFACE], self.INTERFACE, 4))
            self._send(4, 0, text("port") + text("a test"))
        self._send(4, 1, word(256, 256))


@pytest.fixture
def kwin(display: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    installed = shutil.which("kwin_wayland")
    if installed is None or shutil.which("dbus-run-session") is None:
        pytest.skip("needs kwin_wayland and dbus-run-session (Debian: apt-get install kwin-wayland dbus)")
    program = shutil.copy(installed, display.parent)  # without the rights of its file, which a container does not give
    monkeypatch.delenv("DISPLAY", raising=False)
    environment = {"KWIN_FORCE_OWN_QPA": "1", "KWIN_WAYLAND_NO_PERMISSION_CHECKS": "1", "KWIN_COMPOSE": "Q"}
    environment |= {"HOME": str(display.parent), "QT_QPA_PLATFORM": "wayland-org.kde.kwin.qpa"}
    command = ["dbus-run-session", "--", program, "--virtual", "--socket", display.name]
    nothing, whole = subprocess.DEVNULL, {**os.environ, **environment}
    with subprocess.Popen(command, env=whole, stdout=nothing, stderr=nothing, start_new_session=True) as server:
        until(lambda: display.exists() or server.poll() is not None)
        if server.poll() is not None:
            pytest.skip(f"kwin_wayland ends with {server.returncode} on this machine")
        yield display
        os.killpg(server.pid, signal.SIGTERM)


@pytest.mark.process
@pytest.mark.slow
def test_a_real_kwin_says_when_the_pointer_moved(kwin: Path) -> None:
    idle, hand = WaylandIdle(), Hand()
    until(lambda: (idle_s := idle()) is not None and idle_s >= IDLE_AFTER_S)

    def is_seen_to_move() -> bool:
        hand.move()
        return idle() == 0.0

    until(is_seen_to_move)
    hand.close()
    until(lambda: (idle_s := idle()) is not None and idle_s >= IDLE_AFTER_S)
    idle.close()


def test_the_helper_believes_a_compositor_that_counts(display: Path) -> None:
    compositor, now_s = Compositor(display, OFFERS), [1000.0]
    helper = SessionHelper(lambda monitor: None, [WaylandIdle(lambda: now_s[0])])
    place = display.parent / "report"
    with place.open("wb") as file:
        compositor.send(IDLED)
        for now_s[0] in (1005.0, 1010.0):
            helper.look(file.fileno(), now_s[0])
        assert place.stat().st_mtime == pytest.approx(1005.0 - IDLE_AFTER_S)
        compositor.send(RESUMED)
        now_s[0] = 1015.0
        helper.look(file.fileno(), now_s[0])
        assert place.stat().st_mtime == 1015.0
    compositor.end()
