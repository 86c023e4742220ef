"""A serial line between pyserial and a device that loses, flips and invents bytes, and can be unplugged."""

import contextlib
import fcntl
import os
import pty
import random
import select
import threading
import tty
from pathlib import Path
from types import TracebackType


class FaultyLine:
    """A pty of its own, with a link `port` to it; a thread carries the bytes to and from the device's pty.

    The device's pty is locked as SerialTransport locks it: a second reader would take bytes at random.
    """

    def __init__(
        self, device_port: Path, port: Path, rate: float = 0.0, seed: int = 0, pull_after: int | None = None
    ) -> None:
        """Give every byte, both ways, the chance `rate` of a fault; pull the plug once, after `pull_after` bytes."""
        self.port = port
        self.rate = rate
        self.faults = 0
        self.pulled = threading.Event()
        self._left = pull_after
        self._device_port = device_port
        self._random = random.Random(seed)
        self._master = -1
        self._device = -1
        self._thread: threading.Thread | None = None
        self._hand = threading.Lock()  # one hand plugs and pulls
        self._stop_read, self._stop_write = os.pipe()

    def __enter__(self) -> "FaultyLine":
        self.plug()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unplug()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def plug(self) -> None:
        """Make the port appear; like a real one, it may have another name than before."""
        with self._hand:
            self._plug()

    def unplug(self) -> None:
        """Make the port vanish, with whatever was on the wire."""
        with self._hand:
            self._unplug()

    def _plug(self) -> None:
        self._device = os.open(self._device_port, os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.flock(self._device, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._device)
            raise
        tty.setraw(self._device)
        self._master, slave = pty.openpty()
        tty.setraw(slave)
        name = os.ttyname(slave)
        self._thread = threading.Thread(target=self._carry, args=(self._master, self._device, slave), daemon=True)
        self._thread.start()
        fresh = self.port.with_suffix(".new")
        fresh.symlink_to(name)
        fresh.replace(self.port)

    def _unplug(self) -> None:
        if self._thread is None:
            return
        with contextlib.suppress(FileNotFoundError):
            self.port.unlink()
        os.write(self._stop_write, b"x")
        self._thread.join()
        os.read(self._stop_read, 1)
        self._thread = None

    def _carry(self, master: int, device: int, slave: int) -> None:
        try:
            while True:
                ready, _, _ = select.select([master, device, self._stop_read], [], [])
                if self._stop_read in ready:
                    return
                for source, target in ((master, device), (device, master)):
                    if source in ready:
                        self._forward(os.read(source, 4096), target)
                if self._left is not None and self._left <= 0:
                    self._left = None
                    return
        except OSError:
            return  # the device was killed; the host sees a line that is open and silent
        finally:
            for descriptor in (slave, master, device):
                os.close(descriptor)
            self.pulled.set()

    def _forward(self, data: bytes, target: int) -> None:
        data = self._damage(data) if self.rate else data
        self._left = None if self._left is None else self._left - len(data)
        while data:
            data = data[os.write(target, data) :]

    def _damage(self, data: bytes) -> bytes:
        damaged = bytearray()
        for byte in data:
            chance = self._random.random()
            if chance >= self.rate:
                damaged.append(byte)
                continue
            self.faults += 1
            if chance < self.rate / 3:
                continue
            if chance < 2 * self.rate / 3:
                damaged.append(byte ^ 1 << self._random.randrange(8))
            else:
                damaged += bytes([byte, self._random.randrange(256)])
        return bytes(damaged)
