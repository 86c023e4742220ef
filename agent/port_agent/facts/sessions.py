"""How long a desktop has not been used, as the desktop itself reports within its session.

A helper in the session (`port-agent session`) asks the X server, under Wayland the compositor or the desktop over
D-Bus, and reports through a file in /dev/shm. The file's modification time is the last input, and the kernel's own
timestamp next to it shows when the helper last asked. The file's contents are never read or written.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from port_agent.facts.idle import parse_busctl
from port_agent.facts.sysfs import Tree
from port_agent.facts.wayland import NOTIFIER, WaylandIdle
from port_planner.base.errors import PortError

SENSOR = "sessions"
PREFIX = "port-agent-session-"
ASK_S = 5.0
MAX_SILENCE_S = 60.0
"""Seconds after which a helper that has not asked is considered gone, and its report invalid."""
_JITTER_S = 1.0
"""Seconds by which two answers may differ without any input between them."""
_PATIENCE_S = 10.0


class SessionError(PortError):
    """This session has no desktop that reports its idle time."""


@dataclass(frozen=True, slots=True)
class IdleMonitor:
    """A method on the session's bus that returns for how many milliseconds nothing was typed or moved."""

    service: str
    path: str
    interface: str
    method: str


MONITORS = (
    IdleMonitor(
        "org.gnome.Mutter.IdleMonitor",
        "/org/gnome/Mutter/IdleMonitor/Core",
        "org.gnome.Mutter.IdleMonitor",
        "GetIdletime",
    ),
    IdleMonitor(
        "org.freedesktop.ScreenSaver",
        "/org/freedesktop/ScreenSaver",
        "org.freedesktop.ScreenSaver",
        "GetSessionIdleTime",
    ),
)
"""Methods of GNOME, on Wayland and X, and of KDE on X and similar desktops.

KDE on Wayland always answers 0 here; its compositor's socket reports the true value.
"""

Ask = Callable[[IdleMonitor], float | None]
Source = Callable[[], float | None]
"""Returns for how many seconds nothing was typed or moved; None if nothing answers."""


def session_stamps(tree: Tree, wall_s: float) -> dict[str, float]:
    """Return when input was last seen in each session with a helper, in Unix time."""
    stamps: dict[str, float] = {}
    for place in tree.children(tree.dev / "shm", SENSOR):
        if place.name.startswith(PREFIX):
            found = tree.stat(place, SENSOR)
            if found is not None and abs(wall_s - found.st_ctime) <= MAX_SILENCE_S:
                whose = f"session of user {found.st_uid}"
                stamps[whose] = max(found.st_mtime, stamps.get(whose, 0.0))
    return stamps


def ask_desktop(monitor: IdleMonitor) -> float | None:
    """Return the idle seconds of the session, asked with busctl; None if nothing answers."""
    words = (monitor.service, monitor.path, monitor.interface, monitor.method)
    try:
        done = subprocess.run(
            ["busctl", "--user", "--auto-start=no", "call", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    milliseconds = parse_busctl(done.stdout) if done.returncode == 0 else None
    return None if milliseconds is None else milliseconds / 1000.0


class _XScreenSaverInfo(ctypes.Structure):
    """The structure that libXss fills (X11/extensions/scrnsaver.h)."""

    _fields_ = (
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("til_or_since", ctypes.c_ulong),
        ("idle_ms", ctypes.c_ulong),
        ("event_mask", ctypes.c_ulong),
    )


def ask_x_server() -> float | None:
    """Return the idle seconds of the session's X server; None without one, and under Wayland, where
    it sees only its own input.
    """
    if "DISPLAY" not in os.environ or "WAYLAND_DISPLAY" in os.environ:
        return None
    try:
        x, extension = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
    except OSError:
        return None
    x.XOpenDisplay.restype, x.XDefaultRootWindow.restype = ctypes.c_void_p, ctypes.c_ulong
    display = ctypes.c_void_p(x.XOpenDisplay(None))
    if not display:
        return None
    info = _XScreenSaverInfo()
    root = ctypes.c_ulong(x.XDefaultRootWindow(display))
    known = extension.XScreenSaverQueryInfo(display, root, ctypes.byref(info))
    x.XCloseDisplay(display)
    return info.idle_ms / 1000.0 if known else None


@contextlib.contextmanager
def session_file(directory: Path) -> Iterator[int]:
    """Create a report file and yield its descriptor; the file is removed when the block ends. Raises OSError."""
    place = directory / f"{PREFIX}{os.urandom(8).hex()}"
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        place.unlink(missing_ok=True)


class SessionHelper:
    """Writes a desktop's answers to its file."""

    def __init__(self, ask: Ask = ask_desktop, servers: Sequence[Source] | None = None) -> None:
        """`servers`: what is asked before any desktop; None for the X server and the Wayland compositor.

        Raises `SessionError` where nothing answers.
        """
        servers = (ask_x_server, WaylandIdle()) if servers is None else servers
        sources: list[Source] = [*servers, *(partial(ask, monitor) for monitor in MONITORS)]
        found = next((source for source in sources if source() is not None), None)
        if found is None:
            names = " nor ".join(monitor.service for monitor in MONITORS)
            where = "" if shutil.which("busctl") else " (there is no busctl to ask with)"
            raise SessionError(
                f"neither an X server with libXss.so.1, nor a Wayland compositor with {NOTIFIER}, nor {names} on this "
                f"session's bus answers{where}; the agent uses its other signals"
            )
        self._ask, self._input_s = found, 0.0
        self._before: tuple[float, float] | None = None
        self._counts = False
        """Whether answers were ever seen to grow with the clock; until then they are ignored."""

    def look(self, descriptor: int, wall_s: float) -> None:
        """Ask once and report; if the desktop does not answer, or never counts, nothing is reported."""
        idle_s = self._ask()
        if idle_s is None:
            return
        if self._before is not None:
            passed_s, grown_s = wall_s - self._before[0], idle_s - self._before[1]
            self._counts |= passed_s > _JITTER_S and abs(grown_s - passed_s) <= _JITTER_S
        self._before = wall_s, idle_s
        if not self._counts:
            return
        if abs(wall_s - idle_s - self._input_s) > _JITTER_S:
            self._input_s = wall_s - idle_s
        os.utime(descriptor, (self._input_s, self._input_s))

    def run(self, directory: Path) -> None:
        """Report for as long as the session lasts; raises OSError."""
        with session_file(directory) as descriptor:
            while True:
                self.look(descriptor, time.time())
                time.sleep(ASK_S)
