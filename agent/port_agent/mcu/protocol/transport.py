"""A byte pipe to a device, and the one error that it raises when the pipe is gone."""

import errno
import os
from typing import Protocol

import serial

from port_agent.mcu.board.board_errors import DisconnectedError

WRITE_TIMEOUT_S = 10.0
"""Seconds that a write may take.

QEMU's pty has stalled for seconds under floods; real adapters never take this long for one frame.
"""
BAUD = 115200
"""Baud rate, which USB CDC and ptys ignore."""


class Transport(Protocol):
    """The operations of a port that a session needs.

    Every method raises DisconnectedError if the port is gone.
    """

    @property
    def name(self) -> str:
        """Return the port's name for messages."""

    def write(self, data: bytes) -> None:
        """Send all of `data`."""

    def read(self, timeout_s: float) -> bytes:
        """Return what has arrived, at least one byte unless `timeout_s` passes first."""

    def discard(self) -> None:
        """Discard received bytes for which nobody waits."""

    def close(self) -> None:
        """Close the port; further calls raise DisconnectedError. Never raises."""


def _why(error: Exception) -> str:
    """Return why a port cannot be opened, in words that suggest a remedy."""
    number = getattr(error, "errno", None)
    if number in {errno.EAGAIN, errno.EBUSY}:
        return "another program uses it; close that program"
    if number == errno.EACCES:
        return "this user may not open it; add the user to the group dialout and log in again"
    return str(error)


class SerialTransport:
    """A serial port or pty through pyserial."""

    def __init__(self, path: str, baud: int = BAUD, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._path = path
        try:
            self._serial = serial.Serial(path, baud, timeout=0, write_timeout=write_timeout_s, exclusive=True)
        except (serial.SerialException, OSError, ValueError) as error:
            raise DisconnectedError(path, _why(error)) from error

    @property
    def name(self) -> str:
        """Return the path of the port."""
        return self._path

    def write(self, data: bytes) -> None:
        """Send all of `data` within the write timeout.

        Raises DisconnectedError if the port is gone.
        """
        try:
            self._serial.write(data)
        except (serial.SerialException, OSError, TypeError, ValueError) as error:
            raise self._lost(error) from error

    def read(self, timeout_s: float) -> bytes:
        """Return what has arrived, at least one byte unless `timeout_s` passes first.

        Raises DisconnectedError if the port is gone.
        """
        try:
            self._serial.timeout = timeout_s
            first: bytes = self._serial.read(1)
            return first + self._serial.read(self._serial.in_waiting) if first else b""
        except (serial.SerialException, OSError, TypeError, ValueError) as error:
            # TypeError: pyserial reads from a descriptor that a close elsewhere has set to None
            raise self._lost(error) from error

    def discard(self) -> None:
        """Drop received bytes.

        Raises DisconnectedError if the port is gone.
        """
        try:
            self._serial.reset_input_buffer()
        except (serial.SerialException, OSError, TypeError, ValueError) as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Close the port at once, so that the system can give the same name to the board when it returns."""
        try:
            self._serial.close()
        except (serial.SerialException, OSError):
            self._serial.is_open = False

    def _lost(self, error: Exception) -> DisconnectedError:
        self.close()
        gone = "" if os.path.exists(self._path) else " (the port no longer exists)"  # noqa: PTH110 - as given
        return DisconnectedError(self._path, f"{type(error).__name__}: {error}{gone}")
