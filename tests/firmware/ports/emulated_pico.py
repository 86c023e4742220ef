"""A Raspberry Pi Pico in rp2040js, an emulator that shares no code with QEMU: from its boot on, with
a pty as its serial line.
"""

from __future__ import annotations

import os
import subprocess
import tty
from pathlib import Path
from types import TracebackType

from benchmarks.mcu_networks.target import RP2040JS_PLACE
from port_agent.mcu.board.firmware import Firmware, source_root


class EmulatedPico:
    """One Pico; its flash is a file in `folder` and outlives its power. `connection`: "uart" or "usb"."""

    def __init__(self, firmware: Firmware, folder: Path, connection: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.flash = folder / "flash.bin"
        image = firmware.elf.with_suffix(".bin").read_bytes()
        self.flash.write_bytes(image.ljust(firmware.board.flash_bytes, b"\xff"))
        self.port = Path()
        self.connection = connection
        self._line: tuple[int, int] = (-1, -1)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmulatedPico:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Power the Pico: the other end of its line is the pty `port`."""
        line, ours = self._line = os.openpty()
        tty.setraw(ours)
        self.port = Path(os.ttyname(ours))
        script = source_root() / "bench" / "pico.cjs"
        self._process = subprocess.Popen(
            ["node", str(script), os.environ[RP2040JS_PLACE], str(self.flash), str(line), self.connection],
            stdin=subprocess.PIPE,
            pass_fds=self._line,
        )

    def kill(self) -> None:
        """Cut the power."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        for end in self._line:
            os.close(end)
        self._process = None
