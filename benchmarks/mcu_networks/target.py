"""Compiled models on emulated Cortex-M boards: cross-build the bench program, run it in QEMU, read what it computed.

Used by the tests (bit equality with the host) and the benchmarks (RAM and exact instruction counts). The instruction
counter is firmware/bench/count.c, a TCG plugin. QEMU gives instructions, never cycles, wait states or energy.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from port_planner.base.errors import PortError
from port_planner.mcu.compile import CompiledModel
from port_planner.mcu.emit import kinds_mask
from port_planner.mcu.host import HostBuildError, UpdateOptions, engine_sources, firmware_root
from port_planner.mcu.quantize import Int8Array

_REQUEST = struct.Struct("<IIfIII")
_REPLY = struct.Struct("<IIIIIfII")
RUN_TIMEOUT_S = 570.0


RP2040JS = "rp2040js"
"""The emulator of the Raspberry Pi Pico's chip; everything else runs in QEMU."""
RP2040JS_PLACE = "PORT_RP2040JS"
"""The environment variable that says where its npm package is: `npm install rp2040js`, then the
folder node_modules/rp2040js.
"""


class Core(Enum):
    """A Cortex-M or RISC-V core: compiler flags, the emulator's machine, and the flash and RAM
    that the linker enforces.
    """

    M0 = ("-mcpu=cortex-m0 -mfloat-abi=soft", "microbit", 256 * 1024, 16 * 1024)
    M3 = ("-mcpu=cortex-m3 -mfloat-abi=soft", "mps2-an385", 1024 * 1024, 256 * 1024)
    M4F = ("-mcpu=cortex-m4 -mfpu=fpv4-sp-d16 -mfloat-abi=hard", "mps2-an386", 1024 * 1024, 256 * 1024)
    M7F = ("-mcpu=cortex-m7 -mfpu=fpv5-sp-d16 -mfloat-abi=hard", "mps2-an500", 1024 * 1024, 256 * 1024)
    M33 = ("-mcpu=cortex-m33 -mfpu=fpv5-sp-d16 -mfloat-abi=hard", "mps2-an505", 1024 * 1024, 256 * 1024)
    """The Arm core of a Pico 2's RP2350, in its secure state, as it boots."""
    RP2040 = ("-mcpu=cortex-m0plus -mfloat-abi=soft", RP2040JS, 2048 * 1024, 256 * 1024)
    RV32 = ("-march=rv32imc -mabi=ilp32", "virt", 0, 1024 * 1024)
    """The instructions of an ESP32-C3; QEMU's board has no flash, the program is in its RAM."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*(() if self is Core.RV32 else ("-mthumb",)), *self.value[0].split())

    @property
    def tools(self) -> str:
        """The prefix of its compiler's tools."""
        return "riscv64-unknown-elf" if self is Core.RV32 else "arm-none-eabi"

    @property
    def origin(self) -> int:
        """The address at which the program lies."""
        return {Core.RP2040: 0x1000_0000, Core.M33: 0x1000_0000, Core.RV32: 0x8000_0000}.get(self, 0)

    @property
    def ram_origin(self) -> int:
        """The address at which its RAM begins."""
        return 0x3800_0000 if self is Core.M33 else 0x2000_0000

    @property
    def machine(self) -> str:
        return self.value[1]

    @property
    def flash_bytes(self) -> int:
        return self.value[2]

    @property
    def ram_bytes(self) -> int:
        return self.value[3]


class TargetError(PortError):
    """Raised when a build or a run for an emulated core failed, with the tool's last message."""


@dataclass(frozen=True, slots=True)
class Image:
    """A linked bench program: its ELF and its static sizes in bytes."""

    core: Core
    elf: Path
    text_bytes: int
    data_bytes: int
    bss_bytes: int

    @property
    def static_ram_bytes(self) -> int:
        return self.data_bytes + self.bss_bytes


@dataclass(frozen=True, slots=True)
class TargetRun:
    """What the emulated core reported. `instructions` has one entry per sample, empty without counting."""

    parameters: bytes
    generator: int
    steps: int
    correct: int
    loss_sum: float
    stack_bytes: int
    instructions: tuple[int, ...]
    by_symbol: dict[str, int]
    page_bytes: tuple[int, int]
    """Bytes read from and written to the page medium."""


def missing_tools(counting: bool = False) -> str | None:
    """Return which tool is not installed and how to get it, or None if all are there."""
    tools = {"arm-none-eabi-gcc": "gcc-arm-none-eabi", "qemu-system-arm": "qemu-system-arm"}
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt install {package})"
    if counting and shutil.which("cc") is None:
        return "no C compiler for the counting plugin (apt install gcc)"
    return None


def missing_rp2040js() -> str | None:
    """Return why nothing can run on an emulated RP2040, or None."""
    if shutil.which("node") is None:
        return "node is not installed (apt install nodejs)"
    if not (Path(os.environ.get(RP2040JS_PLACE, "")) / "dist" / "cjs" / "index.js").is_file():
        return f"{RP2040JS_PLACE} does not name the folder of the npm package rp2040js"
    return None


def missing_riscv() -> str | None:
    """Return why nothing can run on an emulated RISC-V core, or None."""
    tools = {"riscv64-unknown-elf-gcc": "gcc-riscv64-unknown-elf", "qemu-system-riscv32": "qemu-system-misc"}
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt install {package})"
    if not Path("/usr/lib/picolibc/riscv64-unknown-elf").is_dir():
        return "no C library for it (apt install picolibc-riscv64-unknown-elf)"
    return None


def _run(command: list[str], cwd: Path, timeout_s: float = RUN_TIMEOUT_S) -> str:
    try:
        finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"{command[0]} took over {timeout_s:.0f} s; run fewer samples") from error
    if finished.returncode:
        raise TargetError(
            f"{command[0]} failed: {(finished.stderr or finished.stdout)[-1500:]}; see the command's output"
        )
    return finished.stdout


def build_image(
    model: CompiledModel,
    core: Core,
    directory: Path,
    *,
    optimise: str = "-O2",
    ram_bytes: int | None = None,
    defines: tuple[str, ...] = (),
) -> Image:
    """Cross-compile engine, model and bench program; the linker refuses what does not fit the core."""
    directory.mkdir(parents=True, exist_ok=True)
    model.write(directory)
    bench = firmware_root() / "bench"
    elf = directory / f"bench_{core.name.lower()}.elf"
    startup, script = ("riscv.c", "riscv.ld") if core is Core.RV32 else ("startup.c", "bench.ld")
    sources = [*engine_sources(), directory / "model.c", bench / "main.c", bench / startup]
    flags = [
        "-std=gnu99",
        optimise,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-ffp-contract=off",
        "-ffunction-sections",
        "-fdata-sections",
    ]
    link = [
        "-nostartfiles",
        "-Wl,--gc-sections",
        "-Wl,--no-warn-rwx-segments",
        *(["-specs=picolibc.specs"] if core is Core.RV32 else ["-specs=nano.specs", "-specs=nosys.specs"]),
    ]
    limits = [f"-Wl,--defsym=bench_origin={core.origin}", f"-Wl,--defsym=bench_ram_origin={core.ram_origin}"]
    limits += [f"-Wl,--defsym=bench_flash={core.flash_bytes}", f"-Wl,--defsym=bench_ram={ram_bytes or core.ram_bytes}"]
    include = ["-I", str(firmware_root() / "include"), "-I", str(directory)]
    _run(
        [
            f"{core.tools}-gcc",
            *core.flags,
            *flags,
            *defines,
            f"-DPORT_KINDS={kinds_mask(model.quantized):#x}u",
            *(("-DBENCH_MEDIUM=0x60000000u",) if core is Core.M7F else ()),
            *include,
            *map(str, sources),
            *link,
            *limits,
            "-T",
            str(bench / script),
            "-o",
            str(elf),
        ],
        directory,
    )
    sizes = _run([f"{core.tools}-size", str(elf)], directory).splitlines()[1].split()
    return Image(core, elf, int(sizes[0]), int(sizes[1]), int(sizes[2]))


def build_counter(directory: Path) -> Path:
    """Build the counting plugin for this machine's QEMU; return its path."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise HostBuildError("no C compiler found; install gcc or clang")
    directory.mkdir(parents=True, exist_ok=True)
    plugin = directory / "count.so"
    _run(
        [
            compiler,
            "-O2",
            "-Wall",
            "-Wextra",
            "-shared",
            "-fPIC",
            str(firmware_root() / "bench" / "count.c"),
            "-o",
            str(plugin),
        ],
        directory,
    )
    return plugin


def run_image(
    image: Image,
    samples: Int8Array,
    labels: NDArray[np.int64],
    *,
    options: UpdateOptions | None = None,
    generator: int = 1,
    counter: Path | None = None,
    profile: bool = False,
    by_row: bool = False,
) -> TargetRun:
    """Run samples [N, bytes] through the emulated core, training with `options` or, without, inferring.

    `by_row`: instructions are counted for each row of the step table, not for each sample; the last span of a sample is
    what follows its last row.
    """
    directory = image.elf.parent
    _write_samples(directory / "samples.bin", samples, labels, options, generator, by_row)
    counts = directory / "counts.txt"
    command = _rp2040_command(image) if image.core is Core.RP2040 else _qemu_command(image)
    if counter is not None:
        command += ["-plugin", f"{counter},out={counts},profile={int(profile)}"]
    _run(command, directory)
    reply = (directory / "result.bin").read_bytes()
    status, generator, steps, correct, stack, loss, *pages = _REPLY.unpack_from(reply)
    if status:
        raise TargetError(f"the engine answered status {status} (enum port_status); check options and model")
    spans, symbols = _read_counts(counts) if counter is not None else ((), {})
    return TargetRun(reply[_REPLY.size :], generator, steps, correct, loss, stack, spans, symbols, (pages[0], pages[1]))


def _rp2040_command(image: Image) -> list[str]:
    if problem := missing_rp2040js():
        raise TargetError(f"{problem}; npm install rp2040js")
    flash = image.elf.with_suffix(".bin")
    _run(["arm-none-eabi-objcopy", "-O", "binary", str(image.elf), str(flash)], image.elf.parent)
    return ["node", str(firmware_root() / "bench" / "rp2040.cjs"), os.environ[RP2040JS_PLACE], str(flash)]


def _qemu_command(image: Image) -> list[str]:
    return [
        *(["qemu-system-riscv32", "-bios", "none"] if image.core is Core.RV32 else ["qemu-system-arm"]),
        "-M",
        image.core.machine,
        "-display",
        "none",
        "-monitor",
        "none",
        "-serial",
        "none",
        "-semihosting-config",
        "enable=on,target=native",
        "-kernel",
        str(image.elf),
    ]


def _write_samples(
    path: Path,
    samples: Int8Array,
    labels: NDArray[np.int64],
    options: UpdateOptions | None,
    generator: int,
    by_row: bool,
) -> None:
    chosen = options or UpdateOptions()
    trains = 0 if options is None else 2 if by_row else 1
    head = _REQUEST.pack(len(samples), trains, chosen.learning_rate, int(chosen.rule), int(chosen.scaling), generator)
    body = b"".join(
        struct.pack("<H", int(label)) + sample.tobytes() for sample, label in zip(samples, labels, strict=True)
    )
    path.write_bytes(head + body)


def _read_counts(path: Path) -> tuple[tuple[int, ...], dict[str, int]]:
    text = path.read_text()
    spans = tuple(int(count) for count in re.findall(r"^span \d+ (\d+)$", text, re.MULTILINE))
    symbols: dict[str, int] = {}
    for count, name in re.findall(r"^symbol \d+ (\d+) (.+)$", text, re.MULTILINE):
        symbols[name] = symbols.get(name, 0) + int(count)
    return spans, symbols
