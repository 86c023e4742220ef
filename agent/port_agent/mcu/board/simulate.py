"""Runs the firmware without a board: in QEMU, or as a process.

In both cases the agent uses a real pty.

QEMU emulates core, memory limits (microbit), UART and flash controller, but not the clock, so a simulation does not
show a real board's time or energy.
"""

import contextlib
import os
import re
import select
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from port_agent.mcu.board.board_errors import BuildError, SimulatorError
from port_agent.mcu.board.catalogue import FirmwareBoard
from port_agent.mcu.board.firmware import Firmware
from port_agent.system.locks import LockFile

QEMU = "qemu-system-arm"
START_S = 30.0
"""Seconds to wait for the start: QEMU answers within 0.2 s on an idle machine, but has
taken seconds on a loaded one.
"""


def find_qemu() -> str:
    """Return the path of QEMU; raise BuildError with the way to install it."""
    found = shutil.which(QEMU)
    if found is None:
        raise BuildError(f"{QEMU} is not installed; apt install qemu-system-arm, or use --board posix")
    return found


def command_line(board: FirmwareBoard, elf: Path, storage: Path | None) -> list[str]:
    """Return the command that runs `elf`.

    `storage` keeps the snapshot slots when the process is killed, if the board supports it.
    """
    if board.machine is None:
        return [str(elf)]
    machine = board.machine
    guard = shutil.which("setpriv")  # Linux: the board goes off with the thread that switched it on, however that ends
    command = [guard, "--pdeathsig", "KILL"] if guard else []
    command += [find_qemu(), "-M", machine.name, *machine.arguments, "-display", "none", "-monitor", "none"]
    if storage is not None and machine.storage_bytes is not None:
        backend = f"memory-backend-file,id=nv,mem-path={storage},size={machine.storage_bytes},share=on"
        command += ["-object", backend, "-machine", "memory-backend=nv"]
    return [*command, "-serial", "pty", "-kernel", str(elf)]


class Simulator:
    """A simulated board.

    `port` is a link to the current pty, which may change as a USB port does after replugging.
    """

    def __init__(self, firmware: Firmware, folder: Path, storage: bool = True) -> None:
        """Keep the port link and the storage file in `folder`."""
        if firmware.board.machine is None and firmware.board.cpu:
            raise SimulatorError(f"{firmware.board.name} has no simulator; use qemu-m4f, qemu-m0 or posix")
        folder.mkdir(parents=True, exist_ok=True)
        self.firmware = firmware
        self.port = folder / "port"
        self._storage = folder / "storage.bin" if storage else None
        self._lock: LockFile | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Simulator":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def running(self) -> bool:
        """Return whether the simulated board is powered."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Path:
        """Power the board and return its port.

        Raises SimulatorError if it does not start, and if another process runs this board: they would share its memory.
        """
        if self.running:
            return self.port
        self.kill()
        self._lock = self._locked()
        machine = self.firmware.board.machine
        if self._storage is not None and machine is not None and machine.storage_bytes is not None:
            with open(self._storage, "ab") as file:
                file.truncate(machine.storage_bytes)
        environment = dict(os.environ)
        if machine is None and self._storage is not None:
            environment["PORT_STORAGE"] = str(self._storage)
            environment["PORT_PAGES"] = str(self._storage.with_name("pages.bin"))
        self._process = subprocess.Popen(
            command_line(self.firmware.board, self.firmware.elf, self._storage),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        terminal = self._wait_for_pty(self._process)
        fresh = self.port.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(terminal)
        fresh.replace(self.port)
        return self.port

    def kill(self) -> None:
        """Cut the power: no warning, no flush."""
        self._end_process()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _end_process(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(FileNotFoundError):
            self.port.unlink()  # first: the number of its terminal may be another one's at once
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None

    def _locked(self) -> LockFile:
        lock = LockFile(self.port.with_name("lock"))
        holder = lock.hold()
        if holder is not None:
            raise SimulatorError(
                f"this simulated board already runs on {self.port} (process {holder or 'unknown'}); use it, or end it "
                "first"
            )
        return lock

    def _wait_for_pty(self, process: subprocess.Popen[bytes]) -> str:
        if process.stdout is None:
            raise SimulatorError("the simulator has no output to read its port from")
        seen = b""
        while select.select([process.stdout], [], [], START_S)[0]:
            chunk = os.read(process.stdout.fileno(), 4096)
            seen += chunk
            if match := re.search(rb"(/dev/(?:pts/\d+|ttys\d+))\s", seen):
                return match[1].decode()
            if not chunk:
                break
        self.kill()
        raise SimulatorError(
            f"{self.firmware.board.name} did not start: {seen.decode(errors='replace').strip() or 'no output'}; "
            f"run it manually: {' '.join(command_line(self.firmware.board, self.firmware.elf, self._storage))}"
        )
