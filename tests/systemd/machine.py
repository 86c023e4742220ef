"""A Debian machine with a real systemd under qemu in software emulation, driven over a virtio-serial port."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.systemd.host import Ran

CACHE = Path(__file__).resolve().parents[2] / ".cache/vm"
"""Where `deploy/vm/build.sh` puts qemu, kernels and disks."""
ARM_CACHE = Path(os.environ.get("PORT_ARM_CACHE", CACHE.parent / "arm"))
"""Where `deploy/arm/build.sh` does."""

_COMMAND_LINE = "root=/dev/vda rw quiet nokaslr mitigations=off audit=0 systemd.show_status=false systemd.mask=systemd-udev-trigger.service"


@dataclass(frozen=True, slots=True)
class Board:
    """What is emulated: of which files, by which program, as which machine."""

    cache: Path
    program: str
    firmware: tuple[str, ...]
    """Folders below qemu's /usr/share."""
    hardware: tuple[str, ...]
    command_line: str


PC = Board(
    CACHE,
    "qemu-system-x86_64",
    ("qemu", "seabios"),
    ("-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-smp", "1"),
    f"console=ttyS0 no_timer_check {_COMMAND_LINE}",
)
"""Nehalem is x86-64-v2, which numpy's wheels ask for; newer models bring AVX, which software emulation runs slowly.

no_timer_check: on a busy machine the emulated timer is late, and the kernel would take it for a broken one.
"""
PI_5 = Board(
    ARM_CACHE,
    "qemu-system-aarch64",
    ("qemu",),
    ("-M", "virt,gic-version=3", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "cortex-a76", "-smp", "2"),
    f"console=ttyAMA0 {_COMMAND_LINE}",
)
"""A Cortex-A76 and whatever kernel is named; qemu has no Raspberry Pi 5, so the devices are those of its own board."""

BOOT_S = 900.0
"""20 s on a quiet machine, from power-on to the first answered command."""
POLL_S = 2.0

DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Qemu is killed even where this process is killed without a chance to clean up."""


class MachineGone(Exception):
    """Qemu ended or the machine did not answer in time; the console's end is in the message."""


def qemu(tool: str, cache: Path = CACHE) -> list[str]:
    """Return the command line that runs one program of a cache's qemu tree without installing it."""
    tree = cache / "qemu"
    libraries = ":".join(
        str(tree / part)
        for part in (
            "usr/lib/x86_64-linux-gnu",
            "lib/x86_64-linux-gnu",
            "usr/lib/x86_64-linux-gnu/pulseaudio",
        )
    )
    return [str(tree / "lib64/ld-linux-x86-64.so.2"), "--library-path", libraries, str(tree / "usr/bin" / tool)]


def overlay(suite: str, path: Path, cache: Path = CACHE) -> Path:
    """Return a new copy-on-write disk over the suite's pristine image."""
    base = cache / f"{suite}.ext4"
    create = [*qemu("qemu-img", cache), "create", "-q", "-f", "qcow2", "-b", str(base), "-F", "raw", str(path)]
    subprocess.run(create, check=True)
    return path


def data_disk(content: Path, image: Path, size: str) -> Path:
    """Return an ext4 image of a directory; needs no loop mount."""
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-d", str(content), "-L", image.stem, "-F", str(image), size], check=True
    )
    return image


class Machine:
    """One running machine. Use as a context manager: whatever happens, qemu is killed at the end."""

    def __init__(
        self,
        suite: str,
        disk: Path,
        *,
        read_only: Sequence[Path] = (),
        snapshot: str | None = None,
        ram_mib: int = 1536,
        board: Board = PC,
        boot_options: str = "",
    ) -> None:
        """Start it from power-on, or from a named snapshot inside `disk` (same disks, same RAM)."""
        self._board = board
        self._directory = Path(tempfile.mkdtemp(prefix="port-vm-"))
        self._console = self._directory / "console.log"
        self._pending = b""
        self._requests = 0
        arguments = [*self._arguments(suite, disk, ram_mib), "-append", f"{board.command_line} {boot_options}"]
        for number, image in enumerate(read_only):
            arguments += ["-drive", f"file={image},format=raw,if=none,id=data{number},readonly=on"]
            arguments += ["-device", f"virtio-blk-pci,drive=data{number}"]
        if snapshot is not None:
            arguments += ["-loadvm", snapshot]
        self._errors = self._directory / "qemu.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            self._channel = self._connect("control")
            if snapshot is None:
                self._line(deadline=time.monotonic() + BOOT_S)
        except BaseException:
            self.cut_power()
            raise

    def _arguments(self, suite: str, disk: Path, ram_mib: int) -> list[str]:
        board, cache = self._board, self._board.cache
        folders = [part for name in board.firmware for part in ("-L", str(cache / "qemu/usr/share" / name))]
        return [
            *DIES_WITH_US, *qemu(board.program, cache), *folders, *board.hardware, "-m", str(ram_mib),
            "-display", "none", "-nodefaults", "-no-reboot", "-serial", f"file:{self._console}",
            "-kernel", str(cache / f"{suite}.vmlinuz"), "-initrd", str(cache / f"{suite}.initrd"),
            "-drive", f"file={disk},format=qcow2,if=none,id=root,cache=writeback",
            "-device", "virtio-blk-pci,drive=root",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=control,path={self._directory}/control,server=on,wait=off",
            "-device", "virtserialport,chardev=control,name=port.control",
            "-object", "rng-random,id=random,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=random",
            "-qmp", f"unix:{self._directory}/qmp,server=on,wait=off",
        ]  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut_power()

    def cut_power(self) -> None:
        """Kill qemu between two instructions: for the machine inside, the plug is pulled."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, command: str, timeout_s: float = 300.0) -> Ran:
        """Run a shell command inside and return its end; 124 when it took longer than the limit."""
        self._requests += 1
        request = {"id": self._requests, "cmd": command, "timeout": timeout_s}
        self._channel.settimeout(30)
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + timeout_s + 60
        while (reply := self._line(deadline)).get("id") != self._requests:
            continue
        return Ran(command, reply["rc"], reply["out"])

    def type(self, text: str) -> None:
        """Type on the machine's keyboard: small letters, and a line end for Enter; qemu holds each key for 0.1 s."""
        for letter in text:
            self._monitor(f"sendkey {'ret' if letter == chr(10) else letter}")

    def save(self, snapshot: str) -> None:
        """Keep the running machine, memory included, under a name inside its disk."""
        reply = self._monitor(f"savevm {snapshot}")
        if reply:
            raise MachineGone(f"savevm {snapshot}: {reply}")

    def _monitor(self, command: str) -> str:
        with self._connect("qmp") as monitor, monitor.makefile("rw") as stream:
            stream.readline()
            for message in (
                {"execute": "qmp_capabilities"},
                {"execute": "human-monitor-command", "arguments": {"command-line": command}},
            ):
                stream.write(json.dumps(message) + "\n")
                stream.flush()
                while "event" in (reply := json.loads(stream.readline())):
                    continue
        return str(reply.get("return", reply))

    def _connect(self, name: str) -> socket.socket:
        path = self._directory / name
        end = time.monotonic() + 30
        while True:
            channel = socket.socket(socket.AF_UNIX)
            try:
                channel.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                channel.close()
                if time.monotonic() > end or self._process.poll() is not None:
                    raise MachineGone(self._last_words()) from None
                time.sleep(0.02)
                continue
            return channel

    def _line(self, deadline: float) -> dict[str, Any]:
        self._channel.settimeout(POLL_S)
        while b"\n" not in self._pending:
            try:
                data = self._channel.recv(65536)
            except TimeoutError:
                data = None
            if data == b"" or time.monotonic() > deadline or self._process.poll() is not None:
                raise MachineGone(self._last_words())
            self._pending += data or b""
        line, self._pending = self._pending.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self) -> str:
        console = self._console.read_text(errors="replace")[-1500:] if self._console.exists() else ""
        return f"no answer from the machine\nconsole: {console}\nqemu: {self._errors.read_text()[-500:]}"
