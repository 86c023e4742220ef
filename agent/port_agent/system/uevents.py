"""Receive the kernel's event the moment a plug is pulled, instead of polling for it."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable

_KERNEL_GROUP = 1
"""Multicast group of the kernel's own uevents (2 is udev's)."""
_NETLINK_KOBJECT_UEVENT = 15


class UeventListener:
    """Calls back on every power_supply event."""

    def __init__(self, sock: socket.socket, on_power: Callable[[], None]) -> None:
        self._socket, self._on_power = sock, on_power
        asyncio.get_running_loop().add_reader(sock, self._read)

    @classmethod
    def open(cls, on_power: Callable[[], None]) -> "UeventListener | None":
        """Return a listener; None if the kernel or the sandbox does not allow one. Polling continues in either case."""
        if sys.platform != "linux":
            return None
        try:
            sock = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT)
        except OSError:
            return None
        try:
            sock.bind((0, _KERNEL_GROUP))
        except OSError:
            sock.close()
            return None
        return cls(sock, on_power)

    def close(self) -> None:
        """Stop listening."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # ENOBUFS: events were lost, but the next look sees the state anyway
            message = self._socket.recv(8192)
            if b"SUBSYSTEM=power_supply" in message.split(b"\0"):
                self._on_power()
