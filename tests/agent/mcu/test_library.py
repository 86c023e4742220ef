"""The packages compile for the cores they are for, and train to the bits of the engine on this machine."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.library import Framework, library_files, write_library
from port_agent.mcu.protocol.board_model import InputFormat, ModelDirectory, read_model, write_manifest
from port_planner.base.targets import with_targets
from port_planner.mcu import CompiledModel, HostEngine, Loss, UpdateOptions, compile_model
from tests.agent.mcu.small_model import write_model

pytestmark = pytest.mark.process

DATA = np.random.default_rng(1).normal(size=(40, 2, 6, 5)).astype(np.float32)
LABELS = (DATA[:, 0].mean((1, 2)) > 0).astype(int)
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-O2")
CORES = {
    "m0": ("arm-none-eabi", "-mcpu=cortex-m0", "-mthumb"),
    "m4f": ("arm-none-eabi", "-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard"),
    "m7f": ("arm-none-eabi", "-mcpu=cortex-m7", "-mthumb", "-mfpu=fpv5-d16", "-mfloat-abi=hard"),  # Teensy 4
    "m33": ("arm-none-eabi", "-mcpu=cortex-m33", "-mthumb", "-mfpu=fpv5-sp-d16", "-mfloat-abi=softfp"),  # Pico 2
    "hazard3": ("riscv64-unknown-elf", "-march=rv32imac", "-mabi=ilp32", "--specs=picolibc.specs"),  # the same, RISC-V
    "rv32": ("riscv64-unknown-elf", "-march=rv32imc", "-mabi=ilp32", "--specs=picolibc.specs"),
}
ARDUINO = """
#include <stdlib.h>
enum { INPUT_PULLUP, LOW, A0 };
struct Port { void begin(long); void println(const char *); int available(); int read(); };
extern Port Serial;
int analogRead(int);
int digitalRead(int);
void pinMode(int, int);
void delay(int);
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompiledModel, ModelDirectory]:
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(48, 2)
    )
    model = compile_model(module.eval(), DATA, name="my net")
    folder = tmp_path_factory.mktemp("model")
    model.write(folder)
    tensor = model.quantized.input
    write_manifest(folder, InputFormat(2, 6, 5, float(tensor.scale), tensor.zero), ())
    return model, read_model(folder)


def built(command: list[str | Path]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Library:
    """A package's sources as a shared library of this machine; its slots are memory."""

    def __init__(self, package: Path, flags: tuple[str, ...] = ()) -> None:
        shared = package / f"library{'_'.join(flags)}.so"  # a path of its own: a loaded one is not loaded again
        built(["cc", *WARNINGS, *flags, "-shared", "-fPIC", *sorted(package.glob("src/*.c")), "-o", shared])
        self.calls = ctypes.CDLL(str(shared))
        self.slots = [bytearray(4096), bytearray(4096)]
        self.writes_left = 1 << 30
        move = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32
        )
        self.hooks = (move(self.write), move(self.read))
        addresses = [None, *(ctypes.cast(hook, ctypes.c_void_p) for hook in self.hooks), None]
        self.storage = (ctypes.c_void_p * 4)(*(address and address.value for address in addresses))

    def begin(self) -> int:
        return int(self.calls.port_library_begin(self.storage))

    def write(self, context: int, slot: int, offset: int, data: int, size: int) -> int:
        self.writes_left -= 1
        if self.writes_left < 0:
            return 1
        self.slots[slot][offset : offset + size] = ctypes.string_at(data, size)
        return 0

    def read(self, context: int, slot: int, offset: int, data: int, size: int) -> int:
        ctypes.memmove(data, bytes(self.slots[slot][offset : offset + size]), size)
        return 0

    def train(self, values: np.ndarray, label: int) -> None:
        assert self.calls.port_library_train(self.sample(values), ctypes.c_uint16(label), None) == 0

    def train_to(self, values: np.ndarray, targets: np.ndarray) -> int:
        return int(self.calls.port_library_train_to(self.sample(values), targets.ctypes.data_as(ctypes.c_void_p), None))

    def sample(self, values: np.ndarray) -> ctypes.Array[ctypes.c_int8]:
        row = (ctypes.c_int8 * values.size)()
        self.calls.port_library_quantize(np.ascontiguousarray(values).ctypes.data_as(ctypes.c_void_p), row)
        return row

    def classes(self) -> list[int]:
        return [self.calls.port_library_infer(self.sample(values)) for values in DATA]


def test_it_trains_to_the_bits_of_the_engine_and_keeps_them(
    compiled: tuple[CompiledModel, ModelDirectory], tmp_path: Path
) -> None:
    model, directory = compiled
    package = write_library(directory, Framework.PLATFORMIO, tmp_path)
    library, engine = Library(package, ("-mfma", "-ffp-contract=fast") if _has_fma() else ()), HostEngine(model)
    assert library.begin() == 0
    engine.set_options(UpdateOptions())
    rows = model.quantize_input(DATA)
    for values, row, label in zip(DATA, rows, LABELS, strict=True):
        assert bytes(library.sample(values)) == row.tobytes()
        library.train(values, int(label))
        engine.train(row, int(label))
    learnt = library.classes()
    assert learnt == [engine.infer(row)[0] for row in rows]
    assert library.calls.port_library_save() == 0
    assert engine.parameters in bytes(library.slots[0])  # the same bits, whatever the project's flags
    assert library.calls.port_library_forget() == 0
    library.train(DATA[0], 1)
    library.writes_left = 1  # the power is cut before the header
    assert library.calls.port_library_save() != 0
    assert library.begin() == 0 and library.classes() == learnt
    library.slots[0][80] ^= 1
    assert library.begin() == 0  # no whole slot is left: the weights of the image


def test_it_trains_to_targets_to_the_bits_of_the_engine(
    compiled: tuple[CompiledModel, ModelDirectory], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(60, 5), nn.ReLU(), nn.Linear(5, 3))
    model = compile_model(module.eval(), DATA, name="numbers", loss=Loss.MSE)
    model.write(tmp_path)
    tensor = model.quantized.input
    write_manifest(tmp_path, InputFormat(2, 6, 5, float(tensor.scale), tensor.zero), ())
    library = Library(write_library(read_model(tmp_path), Framework.PLATFORMIO, tmp_path / "package"))
    targets = np.random.default_rng(2).normal(size=(len(DATA), 3)).astype(np.float32)
    engine = HostEngine(model)
    assert library.begin() == 0
    for values, row, wanted in zip(DATA, with_targets(model.quantize_input(DATA), targets, 3), targets, strict=True):
        assert library.train_to(values, wanted) == 0
        engine.train(row, 0)
    assert library.calls.port_library_save() == 0 and engine.parameters in bytes(library.slots[0])
    assert library.train_to(DATA[0], np.array([0, np.inf, 0], np.float32)) == 4
    assert library.classes()[0] == 0
    library.calls.port_library_logits.restype = ctypes.POINTER(ctypes.c_float)
    assert (library.calls.port_library_logits()[:3] == engine.infer(model.quantize_input(DATA[-1:])[0])[1]).all()
    package = write_library(read_model(tmp_path), Framework.ESP_IDF, tmp_path / "example")
    for example in package.rglob("main.c"):
        built(["cc", *WARNINGS, "-I", package / "src", "-c", example, "-o", tmp_path / "x.o"])
    classes = Library(write_library(compiled[1], Framework.PLATFORMIO, tmp_path / "classes"))
    assert classes.begin() == 0 and classes.train_to(DATA[0], targets[0]) == 5


def test_values_that_are_clipped_or_no_numbers_and_labels_that_are_none_are_said(
    compiled: tuple[CompiledModel, ModelDirectory], tmp_path: Path
) -> None:
    package = write_library(compiled[1], Framework.PLATFORMIO, tmp_path)
    shown = "const char *shown(const char *line, const float *values)"
    (package / "src" / "shown.c").write_text(
        f'#include "example.h"\n{shown};\n{shown}\n{{ static char answer[64]; '
        "port_example_do(line, values, answer, sizeof answer); return answer; }\n"
    )
    library = Library(package)
    library.calls.shown.restype = ctypes.c_char_p
    assert library.begin() == 0

    def quantized(values: np.ndarray) -> int:
        row = (ctypes.c_int8 * values.size)()
        return int(library.calls.port_library_quantize(values.ctypes.data_as(ctypes.c_void_p), row))

    def said(line: bytes, values: np.ndarray) -> bytes:
        return bytes(library.calls.shown(line, values.ctypes.data_as(ctypes.c_void_p)))

    good = np.ascontiguousarray(DATA[0])
    far, wrong, endless = good.copy(), good.copy(), good.copy()
    far[0, 0, :3], wrong[1, 2, 1], endless[0, 0, 0] = [1e9, -1e9, 500], np.nan, -np.inf
    assert [quantized(values) for values in (good, far, wrong, endless)] == [0, 3, -1, -1]
    assert said(b"t 1\r\n", far).startswith(b"status 0") and said(b"t 1", far).endswith(b"3 values clipped")
    assert all(b"not a number" in said(line, wrong) for line in (b"t 1", b"i"))
    assert all(
        said(line, good).startswith(b"status 1") for line in (b"t", b"train", b"t 2", b"t -1", b"t 65536", b"t 1x")
    )


def _has_fma() -> bool:
    info = Path("/proc/cpuinfo")
    return info.is_file() and " fma " in info.read_text()


def test_a_compiler_that_fuses_is_noticed(compiled: tuple[CompiledModel, ModelDirectory], tmp_path: Path) -> None:
    if not _has_fma():
        pytest.skip("this processor has no fused multiply-add")
    package = write_library(compiled[1], Framework.PLATFORMIO, tmp_path)
    (package / "src" / "port_exact.h").write_text("")
    unsupported = 5
    assert Library(package, ("-mfma", "-ffp-contract=fast")).begin() == unsupported
    assert Library(package, ("-mfma", "-ffp-contract=off")).begin() == 0


@pytest.mark.parametrize("framework", Framework)
@pytest.mark.parametrize("core", CORES)
def test_packages_compile_for_their_cores(
    framework: Framework, core: str, compiled: tuple[CompiledModel, ModelDirectory], tmp_path: Path
) -> None:
    prefix, *flags = CORES[core]
    if shutil.which(f"{prefix}-gcc") is None or (prefix.startswith("riscv") and not _has_picolibc()):
        pytest.skip(f"{prefix}-gcc and its C library are not installed")
    package = write_library(compiled[1], framework, tmp_path / "package")
    (tmp_path / "pico").mkdir()
    (tmp_path / "pico" / "stdlib.h").write_text("void stdio_init_all(void);\n")
    (tmp_path / "Arduino.h").write_text(ARDUINO)
    common: list[str | Path] = [*flags, *WARNINGS, "-I", package / "src", "-I", tmp_path, "-c"]
    if framework is Framework.PLATFORMIO:  # the sources are the same in all
        for source in sorted(package.glob("src/*.c")):
            built([f"{prefix}-gcc", "-std=gnu11", *common, source, "-o", tmp_path / "x.o"])
    for example in package.rglob("main.c"):
        built([f"{prefix}-gcc", "-std=gnu11", *common, example, "-o", tmp_path / "x.o"])
    for sketch in (*package.rglob("*.ino"), *package.rglob("main.cpp")):
        built([f"{prefix}-g++", "-x", "c++", "-std=gnu++11", *common, sketch, "-o", tmp_path / "x.o"])


def _has_picolibc() -> bool:
    return bool(list(Path("/usr/lib/picolibc/riscv64-unknown-elf").glob("*")))


def test_build_files_name_the_flag_and_every_source(compiled: tuple[CompiledModel, ModelDirectory]) -> None:
    for framework, build in (
        (Framework.ZEPHYR, "CMakeLists.txt"),
        (Framework.PICO_SDK, "CMakeLists.txt"),
        (Framework.ESP_IDF, "CMakeLists.txt"),
        (Framework.PLATFORMIO, "library.json"),
    ):
        files = library_files(compiled[1], framework)
        assert "-ffp-contract=off" in files[build]
        if build == "CMakeLists.txt":
            assert all(name in files[build] for name in files if name.startswith("src/") and name.endswith(".c"))
    assert "name=port_my_net\n" in library_files(compiled[1], Framework.ARDUINO)["library.properties"]


def test_kernels_that_the_model_does_not_use_stay_out(
    compiled: tuple[CompiledModel, ModelDirectory], tmp_path: Path
) -> None:
    package = write_library(compiled[1], Framework.ARDUINO, tmp_path)
    built(["cc", *WARNINGS, "-c", package / "src" / "engine.c", "-o", tmp_path / "engine.o"])
    listed = subprocess.run(["nm", "-u", tmp_path / "engine.o"], capture_output=True, text=True, check=True).stdout
    assert "port_grouped_forward" not in listed and "port_depthwise_forward" in listed  # a group a channel is depthwise
    assert "port_table_forward" not in listed and "port_concat_forward" not in listed


def test_what_a_library_cannot_be_made_of_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with pytest.raises(BoardJobError, match="does not give the scale of its input"):
        write_library(read_model(folder), Framework.ARDUINO, tmp_path / "out")
    header = folder / "model.h"
    header.write_text(header.read_text() + '#define PORT_MODEL_MEDIUM "psram"\n')
    with pytest.raises(BoardJobError, match="pages to an external memory"):
        write_library(read_model(folder), Framework.ARDUINO, tmp_path / "out")
