"""Write an image to a board with the tool of its family, or show the exact command for it.

The tools are optional: adafruit-nrfutil, stm32loader and pyocd come with `pip install port-agent[flash]`, bossac from
the system's packages. Copying to a boot loader's drive (UF2, DAPLink) needs none.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from port_agent.mcu.board.board_errors import FirmwareWriteError
from port_agent.mcu.board.catalogue import FirmwareBoard, FlashMethod
from port_agent.mcu.board.firmware import Firmware

INSTALL = {
    "adafruit-nrfutil": "pip install adafruit-nrfutil",
    "stm32loader": "pip install stm32loader",
    "pyocd": "pip install pyocd",
    "bossac": "apt install bossa-cli",
}
DRIVE_MARKS = {
    FlashMethod.UF2: "INFO_UF2.TXT",
    FlashMethod.BOOTSEL: "INFO_UF2.TXT",
    FlashMethod.DAPLINK: "DETAILS.TXT",
}
DRIVE_HINTS = {
    FlashMethod.UF2: "press the reset button twice so that the boot loader's drive appears",
    FlashMethod.BOOTSEL: "hold BOOTSEL while you plug the board in, so that the drive RPI-RP2 appears",
    FlashMethod.DAPLINK: "plug the board in so that its drive appears",
}


@dataclass(frozen=True, slots=True)
class FlashReport:
    """How an image was written: the commands that ran, or the file that was copied."""

    method: FlashMethod
    commands: tuple[tuple[str, ...], ...]
    copied_to: Path | None = None


Runner = Callable[[Sequence[str]], int]


def run_tool(command: Sequence[str]) -> int:
    """Run a tool with its output in view; return its exit code."""
    return subprocess.run(command, check=False).returncode


def mounted_drives() -> list[Path]:
    """Return the mount points of this machine."""
    return [Path(partition.mountpoint) for partition in psutil.disk_partitions(all=False)]


def commands_for(
    method: FlashMethod, board: FirmwareBoard, firmware: Firmware, port: str
) -> tuple[tuple[str, ...], ...]:
    """Return the commands of a flash method; () for copying to a drive."""
    image, folder = firmware.image, firmware.elf.parent
    binary, package = folder / f"{board.name}.bin", folder / f"{board.name}.zip"
    match method:
        case FlashMethod.NRFUTIL:
            tool = "adafruit-nrfutil"
            make = (tool, "dfu", "genpkg", "--dev-type", "0x0052", "--application", str(image), str(package))
            send = (
                tool,
                "dfu",
                "serial",
                "--package",
                str(package),
                "-p",
                port,
                "-b",
                "115200",
                "--singlebank",
                "--touch",
                "1200",
            )
            return make, send
        case FlashMethod.STM32LOADER:
            return (("stm32loader", "-p", port, "-e", "-w", "-v", "-a", hex(board.flash_origin), str(binary)),)
        case FlashMethod.BOSSAC:
            name = port.removeprefix("/dev/")
            return (
                ("bossac", f"--port={name}", "-e", "-w", "-v", "-R", f"--offset={board.flash_origin:#x}", str(binary)),
            )
        case FlashMethod.PYOCD:
            return (("pyocd", "flash", "-t", str(board.probe_target), str(image)),)
        case _:
            return ()


def flash(
    board: FirmwareBoard,
    firmware: Firmware,
    port: str | None = None,
    drive: Path | None = None,
    run: Runner = run_tool,
    drives: Callable[[], Iterable[Path]] = mounted_drives,
    which: Callable[[str], str | None] = shutil.which,
) -> FlashReport:
    """Write the image with the first method of the board that can be used here.

    Raises FirmwareWriteError with what to do.
    """
    if FlashMethod.NONE in board.methods:
        raise FirmwareWriteError(
            f"{board.name} is simulated and needs no flashing; run: port-agent mcu simulate {firmware.model}"
        )
    for method in board.methods:
        if method in DRIVE_MARKS:
            target = drive or find_drive(method, drives())
            if target is not None:
                return FlashReport(method, (), copy_to_drive(method, board, firmware, target))
            continue
        commands = commands_for(method, board, firmware, port or "PORT")
        needs_port = method is not FlashMethod.PYOCD
        if which(commands[0][0]) is not None and (port is not None or not needs_port):
            return _run_all(method, commands, run)
    raise FirmwareWriteError(
        f"nothing on this machine can flash {board.title} yet; do one of:\n{advice(board, firmware, port)}"
    )


def advice(board: FirmwareBoard, firmware: Firmware, port: str | None) -> str:
    """Return, line by line, every way to flash `board` with its exact command."""
    lines = []
    for method in board.methods:
        if method in DRIVE_MARKS:
            lines.append(f"  {DRIVE_HINTS[method]}, then: cp {image_for(method, board, firmware)} DRIVE/")
            continue
        commands = commands_for(method, board, firmware, port or "PORT")
        lines.append(f"  {INSTALL[commands[0][0]]}; " + " && ".join(shlex.join(command) for command in commands))
    return "\n".join(lines)


def image_for(method: FlashMethod, board: FirmwareBoard, firmware: Firmware) -> Path:
    """Return the file that is copied to the drive of `method`."""
    return firmware.elf.parent / f"{board.name}.{'hex' if method is FlashMethod.DAPLINK else 'uf2'}"


def find_drive(method: FlashMethod, drives: Iterable[Path]) -> Path | None:
    """Return the mounted drive of a boot loader; None if there is none."""
    for path in drives:
        try:
            if (path / DRIVE_MARKS[method]).is_file():
                return path
        except OSError:
            continue  # a drive that was removed while we looked
    return None


def copy_to_drive(method: FlashMethod, board: FirmwareBoard, firmware: Firmware, drive: Path) -> Path:
    """Copy the image; the boot loader resets the board by itself after the last block.

    Raises FirmwareWriteError if the drive cannot be written.
    """
    source = image_for(method, board, firmware)
    target = drive / source.name
    try:
        with open(target, "wb") as file:
            file.write(source.read_bytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FirmwareWriteError(
            f"cannot copy {source} to {drive}: {error}; check that the drive is mounted writable"
        ) from error
    return target


def _run_all(method: FlashMethod, commands: tuple[tuple[str, ...], ...], run: Runner) -> FlashReport:
    for command in commands:
        code = run(command)
        if code != 0:
            raise FirmwareWriteError(
                f"{command[0]} ended with code {code}; check the cable and the boot loader mode, then run again: "
                f"{shlex.join(command)}"
            )
    return FlashReport(method, commands)
