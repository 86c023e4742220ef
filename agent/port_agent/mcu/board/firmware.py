"""Build the firmware of one model for one board, and report how much memory it takes.

The sources are in `firmware/` of a checkout, or data of `port_agent` in an installed wheel. A model is a directory with
model.c and model.h as port_planner.mcu writes them.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from port_agent.mcu.board.board_errors import BuildError, TooLargeError
from port_agent.mcu.board.catalogue import FirmwareBoard, find_board
from port_agent.mcu.board.images import write_hex, write_uf2
from port_planner.base.source_roots import FIRMWARE_SOURCES

CROSS_COMPILER = "arm-none-eabi-gcc"
HOST_COMPILER = "cc"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
EXACT = ("-std=c99", "-ffp-contract=off", "-fno-fast-math")
"""Compiler flags that forbid fused multiply-add and reordering: the same bits on every board and on the host."""
SLOT_HEADER_BYTES = 72
"""Header of a snapshot slot, firmware/src/snapshot.c."""
SECTIONS = ("-ffunction-sections", "-fdata-sections")


@dataclass(frozen=True, slots=True)
class Firmware:
    """One built image.

    `static_ram_bytes` and `flash_bytes` are None for the host's own process.
    """

    board: FirmwareBoard
    elf: Path
    image: Path | None
    model: Path
    static_ram_bytes: int | None
    flash_bytes: int | None


def source_root() -> Path:
    """Return the directory of the firmware sources.

    Raises BuildError if the installation lacks it.
    """
    if not (FIRMWARE_SOURCES / "src" / "main.c").is_file():
        raise BuildError(
            f"no firmware sources in {FIRMWARE_SOURCES}; install port-agent again, or run it from a checkout"
        )
    return FIRMWARE_SOURCES


def find_compiler(board: FirmwareBoard) -> str:
    """Return the compiler for `board`; raise BuildError with the way to install it."""
    name = CROSS_COMPILER if board.cpu else HOST_COMPILER
    found = shutil.which(name)
    if found is None:
        remedy = (
            "apt install gcc-arm-none-eabi libnewlib-arm-none-eabi (Debian, Ubuntu, Raspberry Pi OS) or brew install "
            "--cask gcc-arm-embedded (macOS)"
            if board.cpu
            else "install a C compiler"
        )
        raise BuildError(f"{name} is not installed; {remedy}")
    return found


def build_firmware(
    board: FirmwareBoard | str, model: Path, out: Path, optimise: str = "-O2", extra: tuple[str, ...] = ()
) -> Firmware:
    """Compile and link the firmware with the model in directory `model` into directory `out`.

    `extra` is passed to the compiler unchanged: sanitizers, or a board's own definitions. Raises BuildError if the
    compiled model is missing or the compiler rejects it.
    """
    board = find_board(board) if isinstance(board, str) else board
    if not (model / "model.c").is_file() or not (model / "model.h").is_file():
        raise BuildError(f"{model} holds no compiled model (model.c, model.h); make one with: port-agent mcu compile")
    _check_medium(board, model)
    out.mkdir(parents=True, exist_ok=True)
    elf = out / f"{board.name}.elf"
    root = source_root()
    command = [find_compiler(board), *board.cpu, optimise, *EXACT, *SECTIONS, *WARNINGS, *extra]
    if board.cpu:
        command += ["-mthumb", "-g", "-ffreestanding", "-fno-builtin-printf"]
    command += [f"-D{name}={value}" for name, value in _defines(board, model).items()]
    command += [
        f"-I{path}"
        for path in (model, root / "include", root / "protocol", root / "src", root / "ports", root / "media")
    ]
    command += [f"-I{root / 'ports' / 'cortexm'}"] if board.cpu else []
    command += [str(path) for path in _sources(root, board)] + [str(model / "model.c"), "-o", str(elf)]
    command += _link_options(root, board, model, out) if board.cpu else []
    _run(command, board)
    if not board.cpu:
        return Firmware(board, elf, None, model, None, None)
    static, flash = _sizes(elf, board)
    return Firmware(board, elf, _write_image(board, elf, out), model, static, flash)


def parameter_bytes(model: Path) -> int:
    """Return PORT_MODEL_PARAMETER_BYTES of a compiled model.

    Raises BuildError if the model's header does not define it.
    """
    match = re.search(r"^#define\s+PORT_MODEL_PARAMETER_BYTES\s+(\d+)", (model / "model.h").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError(f"{model / 'model.h'} does not define PORT_MODEL_PARAMETER_BYTES; compile the model again")
    return int(match[1])


def kernel_kinds(model: Path) -> int:
    """Return the kinds of ops of a compiled model, one bit each; all if its header does not list them."""
    match = re.search(r"^#define\s+PORT_MODEL_KINDS\s+(0x[0-9a-f]+)u", (model / "model.h").read_text(), re.MULTILINE)
    return int(match[1], 16) if match else 0xFFFF_FFFF


def page_medium(model: Path) -> str | None:
    """Return the medium to which a compiled model pages; None if it does not page."""
    match = re.search(r'^#define\s+PORT_MODEL_MEDIUM\s+"(\w+)"', (model / "model.h").read_text(), re.MULTILINE)
    return match[1] if match else None


def _check_medium(board: FirmwareBoard, model: Path) -> None:
    medium = page_medium(model)
    if medium is not None and medium not in board.media:
        has = " and ".join(board.media) or "no external memory"
        raise BuildError(
            f"the model pages to {medium}, but {board.name} has {has}; compile it with another --page, or for another "
            "board"
        )


def slot_bytes(board: FirmwareBoard, model: Path) -> int:
    """Return the size of one of the two snapshot slots: whole flash pages.

    The size is 0 for a board without slots.
    """
    if not board.has_storage:
        return 0
    needed = SLOT_HEADER_BYTES + parameter_bytes(model) + 3
    return -(-needed // board.page_bytes) * board.page_bytes


def _flash_length(board: FirmwareBoard, model: Path) -> int:
    slots = 0 if board.storage_origin is not None else 2 * slot_bytes(board, model)
    return board.flash_bytes - board.flash_reserved_bytes - slots


def _defines(board: FirmwareBoard, model: Path) -> dict[str, str]:
    slot = slot_bytes(board, model)
    storage = board.storage_origin
    if storage is None:
        storage = board.flash_origin + _flash_length(board, model)
    numbers = {
        "PORT_RAM_BYTES": board.ram_bytes,
        "PORT_FLASH_BYTES": board.flash_bytes,
        "PORT_SLOT_BYTES": slot,
        "PORT_KINDS": kernel_kinds(model),
        "DEVICE_PAYLOAD_MAX": board.payload_bytes,
        "RECEIVE_RING_BYTES": board.ring_bytes,
        **board.defines,
        **board.media.get(page_medium(model) or "", {}),
    }
    if board.cpu:
        numbers |= {
            "PORT_STORAGE_ORIGIN": storage,
            "PORT_PAGE_BYTES": board.page_bytes,
            "PORT_INTERRUPTS": board.interrupts,
            "PORT_UART_INTERRUPT": board.uart_interrupt,
        }
    return {name: f"{value}u" for name, value in numbers.items()} | {"PORT_BOARD_NAME": f'"{board.name}"'}


def _sources(root: Path, board: FirmwareBoard) -> list[Path]:
    folders = ["engine", "kernels", "media", "protocol", "src", f"ports/{board.port}"]
    folders += ["ports/cortexm"] if board.cpu else []
    return [path for folder in folders for path in sorted((root / folder).glob("*.c"))]


def _link_options(root: Path, board: FirmwareBoard, model: Path, out: Path) -> list[str]:
    symbols = {
        "PORT_FLASH_ORIGIN": board.flash_origin,
        "PORT_FLASH_LENGTH": _flash_length(board, model),
        "PORT_RAM_ORIGIN": board.ram_origin,
        "PORT_RAM_LENGTH": board.ram_bytes - (board.ram_origin - 0x2000_0000),
        "PORT_STACK_BYTES": board.stack_bytes,
    }
    return [
        "-nostartfiles",
        "--specs=nano.specs",
        "-Wl,--gc-sections",
        "-Wl,--no-warn-rwx-segments",
        f"-Wl,-Map={out / board.name}.map",
        *(f"-Wl,--defsym={name}={value}" for name, value in symbols.items()),
        "-T",
        str(root / "ports" / "cortexm" / "memory.ld"),
    ]


def _run(command: list[str], board: FirmwareBoard) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    overflow = re.search(r"region `(\w+)' overflowed by (\d+) bytes", done.stderr)
    if overflow:
        raise TooLargeError(
            board.title,
            overflow[1],
            int(overflow[2]),
            "compile the model with a smaller --ram, fewer trained layers, or choose a larger board",
        )
    raise BuildError(f"{command[0]} failed for {board.name}:\n{done.stderr.strip()[-4000:]}")


def _sizes(elf: Path, board: FirmwareBoard) -> tuple[int, int]:
    """Return static RAM (stack not counted) and flash in bytes, from the section table."""
    listing = subprocess.run(
        [CROSS_COMPILER.replace("gcc", "size"), "-A", str(elf)], capture_output=True, text=True, check=True
    ).stdout
    sizes = {name: int(size) for name, size in re.findall(r"^(\.\S+)\s+(\d+)", listing, re.MULTILINE)}
    ram = sum(sizes.get(name, 0) for name in (".data", ".bss", ".noinit"))
    flash = sum(sizes.get(name, 0) for name in (".text", ".ARM.exidx", ".data"))
    return ram, flash


def _write_image(board: FirmwareBoard, elf: Path, out: Path) -> Path:
    """Write the file for the board's first flash method, next to a plain .hex."""
    binary = out / f"{board.name}.bin"
    subprocess.run([CROSS_COMPILER.replace("gcc", "objcopy"), "-O", "binary", str(elf), str(binary)], check=True)
    data = binary.read_bytes()
    image = out / f"{board.name}.hex"
    write_hex(image, board.flash_origin, data)
    if board.uf2_family is not None:
        write_uf2(out / f"{board.name}.uf2", board.flash_origin, data, board.uf2_family)
    return image
