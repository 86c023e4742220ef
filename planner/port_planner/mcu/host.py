"""The firmware's engine, built for this machine: the oracle, and a fast way to train int8 models in experiments.

The C sources are those of the firmware. They are compiled with -ffp-contract=off into a shared library with one model.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from port_planner.base.errors import PortError
from port_planner.base.source_roots import FIRMWARE_SOURCES
from port_planner.mcu.compile import CompiledModel
from port_planner.mcu.ir import row_bytes
from port_planner.mcu.quantize import Int8Array

FLAGS = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")

FAST = ("-O3", "-DPORT_SIMD_EMULATE")
"""Further flags, for experiments with many samples: the loops of the DSP kernels give the same bits
in two thirds of the time.
"""


MAX_CODE = 127
"""Largest code of a weight, of either sign."""


class UpdateRounding(IntEnum):
    """Rounding of the int8 update; the numbers are those of `enum port_rule`."""

    STOCHASTIC = 0
    NEAREST = 1
    TRUNCATE = 2
    Q88 = 3


class HostBuildError(PortError):
    """Raised when the engine could not be built for this machine."""


class EngineError(PortError):
    """Raised when the engine rejected a call, with its status code."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} returned status {status} (enum port_status in port_engine.h); check the arguments")
        self.call = call
        self.status = status


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of the on-device update: learning rate, rounding rule, quantisation-aware scaling."""

    learning_rate: float = 0.01
    rule: UpdateRounding = UpdateRounding.STOCHASTIC
    scaling: bool = True


@dataclass(frozen=True, slots=True)
class EngineState:
    """The part of a checkpoint that is not parameters."""

    generator: int
    steps: int


def firmware_root() -> Path:
    """Return the directory of the firmware sources.

    Raises HostBuildError if they are missing.
    """
    if not (FIRMWARE_SOURCES / "include" / "port_engine.h").is_file():
        raise HostBuildError(
            f"no firmware sources in {FIRMWARE_SOURCES}; install port-agent again, or run it from a checkout"
        )
    return FIRMWARE_SOURCES


def engine_sources() -> list[Path]:
    """Return the C files of the engine, its kernels and the memory that simulates a page medium, in a fixed order."""
    root = firmware_root()
    return [*sorted((root / "engine").glob("*.c")), *sorted((root / "kernels").glob("*.c")), root / "media" / "psram.c"]


class _Options(ctypes.Structure):
    _fields_ = (("learning_rate", ctypes.c_float), ("rule", ctypes.c_uint8), ("scaling", ctypes.c_uint8))


class _State(ctypes.Structure):
    _fields_ = (("generator", ctypes.c_uint32), ("steps", ctypes.c_uint32))


class _Result(ctypes.Structure):
    _fields_ = (("loss", ctypes.c_float), ("predicted", ctypes.c_uint16), ("correct", ctypes.c_uint8))


class _Engine(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 32),)  # larger than port_engine on every host


class _Medium(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 8),)  # port_medium


class _Psram(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("words", ctypes.c_uint64 * 10))  # larger than psram on every host


class PageCounters(ctypes.Structure):
    """The pager's work since it was bound: bytes read, bytes written in whole blocks, failures, damaged pages."""

    _fields_ = (
        ("read_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("failed", ctypes.c_uint32),
        ("damaged", ctypes.c_uint32),
    )


_YIELD = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)


@functools.cache
def _scratch_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="port-engine-")  # removed when the process ends


@functools.cache
def _engine_objects(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Compile engine and kernels once per process and set of flags; return the object files."""
    folder = Path(_scratch_directory().name) / hashlib.sha256(repr(flags).encode()).hexdigest()[:16]
    folder.mkdir()
    objects = []
    for source in engine_sources():
        objects.append(str(folder / f"{source.parent.name}_{source.stem}.o"))
        _compile(
            [*FLAGS, *flags, "-fPIC", "-I", str(firmware_root() / "include"), "-c", str(source), "-o", objects[-1]]
        )
    return tuple(objects)


def _compile(arguments: list[str]) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise HostBuildError("no C compiler found; install gcc or clang")
    finished = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise HostBuildError(f"the engine does not build: {finished.stderr[-2000:]}; check the compiler")


def build_library(model: CompiledModel, directory: Path, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile engine, kernels and model into a shared library in `directory`; return its path."""
    model.write(directory)
    library = directory / f"engine_{model.sha256.hex()[:16]}.so"
    include = ["-I", str(firmware_root() / "include"), "-I", str(directory)]
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror"]  # the tables need no optimiser
    _compile(
        [
            *strict,
            "-shared",
            "-fPIC",
            *include,
            *_engine_objects(extra_flags),
            str(directory / "model.c"),
            "-o",
            str(library),
        ]
    )
    return library


class HostEngine:
    """One engine with its memory, driven through the same calls as the firmware."""

    def __init__(self, model: CompiledModel, extra_flags: tuple[str, ...] = ()) -> None:
        self.model = model
        with tempfile.TemporaryDirectory(prefix="port-engine-") as folder:
            self._library = ctypes.CDLL(str(build_library(model, Path(folder), extra_flags)))
        self._prepare()
        self._arena = _aligned_buffer(model.memory.arena.peak_bytes)
        self.medium = _aligned_buffer(0 if model.memory.medium is None else model.memory.medium.size_bytes)
        """The simulated page medium."""
        self._on_medium = bool(model.memory.parameters.pages)
        size = model.memory.parameters.size_bytes
        self._parameters = self.medium if self._on_medium else _aligned_buffer(size)
        self._engine = _Engine()
        table = ctypes.c_char.in_dll(self._library, "port_generated_model")
        self._check(
            "port_engine_init",
            self._library.port_engine_init(
                ctypes.byref(self._engine),
                ctypes.byref(table),
                self._arena.ctypes.data,
                self._arena.size,
                self._parameters.ctypes.data,
                self._parameters.size,
            ),
        )
        self._callback: object = None
        self._psram = _Psram(self.medium.ctypes.data)
        self._medium = self._library.psram_medium(ctypes.byref(self._psram), ctypes.c_uint32(self.medium.size))
        if self.medium.size:
            status = self._library.port_medium_set(ctypes.byref(self._engine), ctypes.byref(self._medium))
            self._check("port_medium_set", status)
        self.reset()

    def _prepare(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library.port_engine_init.argtypes = [pointer, pointer, pointer, size, pointer, size]
        self._library.port_logits.restype = ctypes.POINTER(ctypes.c_float)
        self._library.port_state_get.restype = _State
        self._library.port_state_set.argtypes = [pointer, _State]
        self._library.psram_medium.restype = _Medium
        self._library.port_parameters.restype = pointer
        self._library.port_parameters_view.restype = pointer
        self._library.port_page_counters_get.restype = PageCounters

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status:
            raise EngineError(call, status)

    def reset(self) -> None:
        """Load the initial parameters and generator."""
        self._check("port_parameters_reset", self._library.port_parameters_reset(ctypes.byref(self._engine)))

    def set_options(self, options: UpdateOptions) -> None:
        """Set the learning rate, rounding rule and scaling."""
        raw = _Options(options.learning_rate, int(options.rule), int(options.scaling))
        self._check("port_options_set", self._library.port_options_set(ctypes.byref(self._engine), ctypes.byref(raw)))

    @property
    def state(self) -> EngineState:
        raw = self._library.port_state_get(ctypes.byref(self._engine))
        return EngineState(raw.generator, raw.steps)

    @state.setter
    def state(self, state: EngineState) -> None:
        self._library.port_state_set(ctypes.byref(self._engine), _State(state.generator, state.steps))

    @property
    def parameters(self) -> bytes:
        """The parameter region as it is now."""
        return self._region(self._library.port_parameters_view).tobytes()

    @parameters.setter
    def parameters(self, image: bytes) -> None:
        self._region(self._library.port_parameters)[:] = np.frombuffer(image, np.uint8)

    def _region(self, call: Callable[[object], int | None]) -> NDArray[np.uint8]:
        at = call(ctypes.byref(self._engine)) or 0
        home = self._parameters
        start = at - home.ctypes.data if home.size else 0
        return home[start : start + self.model.memory.parameters.size_bytes]

    def values(self, layer: str) -> bytes:
        """Return one layer's trained biases and weights, wherever the plan puts them."""
        slot, op = self.model.memory.parameters.slots[layer], self.model.quantized.graph.op(layer)
        update, image = self.model.scheme.of(layer), self.parameters
        found = b""
        if slot.bias_offset is not None:
            found += image[slot.bias_offset :][: 4 * op.rows]
        if slot.weight_offset is not None:
            found += image[slot.weight_offset :][: update.rows * row_bytes(op)]
        return found

    def at_limit(self, layer: str) -> float:
        """Return the share of a layer's trained weights that are at the end of their range,
        beyond which they cannot grow.
        """
        op = self.model.quantized.graph.op(layer)
        count = self.model.scheme.of(layer).rows * row_bytes(op)
        weights = np.frombuffer(self.values(layer)[-count:], np.int8)
        return float(np.mean(np.abs(weights.astype(np.int16)) >= MAX_CODE))

    @property
    def pages(self) -> PageCounters:
        """The paging since the engine was created."""
        counters: PageCounters = self._library.port_page_counters_get(ctypes.byref(self._engine))
        return counters

    @property
    def torn(self) -> bool:
        """Whether a step was interrupted, so that parameters must be loaded before anything else."""
        return bool(self._library.port_is_torn(ctypes.byref(self._engine)))

    def tensor(self, buffer: str, count: int, dtype: type[np.generic] = np.int8) -> NDArray[np.generic]:
        """Return a copy of `count` values of an arena buffer by its name in the memory plan."""
        start = self.model.memory.offset(buffer)
        return self._arena[start:].view(np.uint8)[: count * np.dtype(dtype).itemsize].view(dtype).copy()

    def observe(self, callback: Callable[[int], None] | None) -> None:
        """Call `callback(step)` after every table step; None stops it."""
        if callback is None:
            self._callback = None
        else:
            self._callback = _YIELD(lambda _context, step: callback(step))
        self._library.port_yield_set(ctypes.byref(self._engine), self._callback, None)

    def infer(self, sample: Int8Array) -> tuple[int, NDArray[np.float32]]:
        """Return the predicted class and the logits of one int8 sample."""
        self._write(sample)
        result = _Result()
        self._check("port_infer", self._library.port_infer(ctypes.byref(self._engine), ctypes.byref(result)))
        logits = np.ctypeslib.as_array(
            self._library.port_logits(ctypes.byref(self._engine)), (self.model.quantized.graph.classes,)
        )
        return int(result.predicted), logits.copy()

    def train(self, sample: Int8Array, label: int) -> tuple[float, bool]:
        """Train on one sample; return the loss in nats, and whether the prediction was right before the update."""
        self._write(sample)
        result = _Result()
        self._check(
            "port_train",
            self._library.port_train(ctypes.byref(self._engine), ctypes.c_uint16(label), ctypes.byref(result)),
        )
        return float(result.loss), bool(result.correct)

    def _write(self, sample: Int8Array) -> None:
        data = np.ascontiguousarray(sample, np.int8)
        status = self._library.port_input_write(
            ctypes.byref(self._engine), 0, ctypes.c_void_p(data.ctypes.data), data.size
        )
        self._check("port_input_write", status)

    def train_many(
        self, samples: Int8Array, labels: NDArray[np.int64], order: NDArray[np.int64] | None = None
    ) -> tuple[float, float]:
        """Train on samples [N, bytes] in `order`.

        Return the mean loss and the share of samples predicted correctly before their update.
        """
        order = np.arange(len(samples)) if order is None else order
        picked = np.ascontiguousarray(order, np.uint32)
        return self._many("port_train_many", samples, labels, picked)

    def evaluate(self, samples: Int8Array, labels: NDArray[np.int64]) -> tuple[float, float]:
        """Return mean loss and accuracy over samples [N, bytes]."""
        return self._many("port_eval_many", samples, labels, None)

    def _many(
        self, call: str, samples: Int8Array, labels: NDArray[np.int64], order: NDArray[np.uint32] | None
    ) -> tuple[float, float]:
        data, targets = np.ascontiguousarray(samples, np.int8), np.ascontiguousarray(labels, np.uint16)
        count = len(data) if order is None else len(order)
        loss, correct = ctypes.c_float(0.0), ctypes.c_uint32(0)
        addresses = [ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(targets.ctypes.data)]
        if order is not None:
            addresses.append(ctypes.c_void_p(order.ctypes.data))
        status = getattr(self._library, call)(
            ctypes.byref(self._engine), *addresses, count, ctypes.byref(loss), ctypes.byref(correct)
        )
        self._check(call, status)
        return loss.value / max(1, count), correct.value / max(1, count)


def _aligned_buffer(size_bytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(size_bytes + 16, np.uint8)
    start = -memory.ctypes.data % 8
    return memory[start : start + size_bytes]
