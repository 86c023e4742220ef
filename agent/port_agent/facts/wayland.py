"""How long a Wayland session has not been used, as its compositor reports through `ext_idle_notifier_v1`.

KWin (KDE Plasma), sway, labwc (Raspberry Pi OS), Hyprland and COSMIC speak this protocol; GNOME answers over D-Bus
instead. The few messages that it takes are written and parsed here, so that no library is needed.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NOTIFIER, SEAT = "ext_idle_notifier_v1", "wl_seat"
IDLE_AFTER_S = 1.0
"""Seconds without input after which the compositor reports that nobody uses the session."""
_PATIENCE_S = 5.0
_DISPLAY, _REGISTRY, _LISTED, _SEAT, _NOTIFIER, _NOTIFICATION = range(1, 7)
"""Identifiers of this connection's objects: the protocol fixes the first, and the client chooses the others."""
_SYNC, _GET_REGISTRY, _BIND, _GET_NOTIFICATION = 0, 1, 0, 1
"""Request numbers of the protocol for wl_display, wl_registry and the notifier."""
_ERROR, _GLOBAL, _DONE, _IDLED = 0, 0, 0, 0
"""Events of wl_display, wl_registry, a callback and the notification."""
_WORD, _HEADER = struct.Struct("=I"), struct.Struct("=IHH")
_CHUNK_BYTES = 8192

_Event = tuple[int, int, bytes]
"""The object of an event, the event's number, and its arguments."""


class WaylandIdle:
    """Queries a session's compositor repeatedly.

    The first query connects, and so does the next one after a lost connection.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._connection: socket.socket | None = None
        self._received = b""
        self._idle, self._last_input_s = False, 0.0

    def __call__(self) -> float | None:
        """Return the idle seconds of the session; None without a compositor that reports them."""
        try:
            if self._connection is None and not self._connect():
                return None
            self._take_reports()
        except OSError:
            self.close()
            return None
        now_s = self._monotonic_s()
        if not self._idle:
            self._last_input_s = now_s
        return now_s - self._last_input_s

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._received, self._idle = None, b"", False

    def _connect(self) -> bool:
        """Ask for reports from now on; return whether there is a compositor that gives them. Raises OSError."""
        place = os.environ.get("WAYLAND_DISPLAY")
        if not place:
            return False
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(_PATIENCE_S)
        self._connection.connect(str(Path(os.environ.get("XDG_RUNTIME_DIR", "/"), place)))
        offered = self._offered()
        if not offered.keys() >= {NOTIFIER, SEAT}:
            self.close()
            return False
        self._send(_REGISTRY, _BIND, _binding(offered[SEAT], SEAT, _SEAT))
        self._send(_REGISTRY, _BIND, _binding(offered[NOTIFIER], NOTIFIER, _NOTIFIER))
        self._send(_NOTIFIER, _GET_NOTIFICATION, struct.pack("=III", _NOTIFICATION, round(IDLE_AFTER_S * 1e3), _SEAT))
        self._connection.setblocking(False)
        return True

    def _offered(self) -> dict[str, int]:
        """Return the compositor's interfaces, each with the number by which its first object is bound.

        Raises OSError.
        """
        self._send(_DISPLAY, _GET_REGISTRY, _WORD.pack(_REGISTRY))
        self._send(_DISPLAY, _SYNC, _WORD.pack(_LISTED))
        offered: dict[str, int] = {}
        for sender, event, arguments in self._events():
            if (sender, event) == (_REGISTRY, _GLOBAL):
                offered.setdefault(_text(arguments[_WORD.size :]), _WORD.unpack_from(arguments)[0])
            elif (sender, event) == (_LISTED, _DONE):
                break
        return offered

    def _take_reports(self) -> None:
        """Read the events since the last query; raises OSError."""
        with contextlib.suppress(BlockingIOError):
            for sender, event, _ in self._events():
                if sender == _NOTIFICATION:
                    self._idle = event == _IDLED
                    self._last_input_s = self._monotonic_s() - IDLE_AFTER_S

    def _send(self, target: int, request: int, arguments: bytes) -> None:
        if self._connection is not None:
            self._connection.sendall(_HEADER.pack(target, request, _HEADER.size + len(arguments)) + arguments)

    def _events(self) -> Iterator[_Event]:
        """Yield the compositor's events; raises OSError, also when it disconnects or reports an error."""
        while self._connection is not None:
            while len(self._received) >= _HEADER.size:
                sender, event, length = _HEADER.unpack_from(self._received)
                if length < _HEADER.size:
                    raise ConnectionError(f"the compositor sent a message of {length} bytes")
                if len(self._received) < length:
                    break
                arguments, self._received = self._received[_HEADER.size : length], self._received[length:]
                if (sender, event) == (_DISPLAY, _ERROR):
                    raise ConnectionError(_text(arguments[2 * _WORD.size :]))
                yield sender, event, arguments
            more = self._connection.recv(_CHUNK_BYTES)
            if not more:
                raise ConnectionError("the compositor has ended")
            self._received += more


def _text(argument: bytes) -> str:
    (length,) = _WORD.unpack_from(argument)
    return argument[_WORD.size : _WORD.size + length - 1].decode("utf-8", "replace")


def _binding(number: int, interface: str, target: int) -> bytes:
    """Return the arguments that bind an object of version 1 to a number of ours."""
    name = interface.encode() + b"\0"
    padding = bytes(-len(name) % _WORD.size)
    return _WORD.pack(number) + _WORD.pack(len(name)) + name + padding + struct.pack("=II", 1, target)
