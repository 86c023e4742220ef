"""Samples kept in flash: a ring that loses nothing but what it must, and that a board does not forget with."""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from port_agent.mcu.library import Framework, write_library
from port_agent.mcu.protocol.board_model import InputFormat, read_model, write_manifest
from port_planner.base.targets import with_targets
from port_planner.mcu import CompiledModel, HostEngine, Loss, UpdateOptions, compile_model

pytestmark = pytest.mark.process

RECORD_BYTES, SECTOR_BYTES, SECTORS = 48, 160, 4  # 24 inputs behind 16 bytes; three records a sector
BLANK = 0xFF
SAMPLES = np.random.default_rng(0).integers(-100, 100, (64, 24)).astype(np.int8)
MOVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32)
ERASE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
RANGE, ARGUMENT, MEMORY, MEDIUM = 4, 1, 2, 6


class Memory(ctypes.Structure):
    """port_replay_memory."""

    _fields_ = (
        ("sectors", ctypes.c_uint32),
        ("sector_bytes", ctypes.c_uint32),
        ("erase", ERASE),
        ("write", MOVE),
        ("read", MOVE),
        ("context", ctypes.c_void_p),
    )


class Flash:
    """NOR flash: erased by sectors, written once; `actions_left` until the power goes, in the middle of an action."""

    def __init__(self, sectors: int = SECTORS, sector_bytes: int = SECTOR_BYTES) -> None:
        self.sector_bytes = sector_bytes
        self.content = bytearray([BLANK] * (sectors * sector_bytes))
        self.actions_left, self.faults = 1 << 30, 0
        self.read_places: Counter[int] = Counter()
        self.memory = Memory(sectors, sector_bytes, ERASE(self.erase), MOVE(self.write), MOVE(self.read), None)

    def spend(self, size: int) -> int:
        """Return how many of `size` bytes an action still does."""
        self.actions_left -= 1
        return size if self.actions_left > 0 else size // 2 if self.actions_left == 0 else 0

    def erase(self, context: int, sector: int) -> int:
        done, start = self.spend(self.sector_bytes), sector * self.sector_bytes
        self.content[start : start + done] = bytes([BLANK] * done)
        return int(done < self.sector_bytes)

    def write(self, context: int, offset: int, data: int, size: int) -> int:
        done = self.spend(size)
        target = self.content[offset : offset + done]
        self.faults += any(byte != BLANK for byte in target) or offset % 16 != 0 or size % 16 != 0
        self.content[offset : offset + done] = ctypes.string_at(data, done)
        return int(done < size)

    def read(self, context: int, offset: int, data: int, size: int) -> int:
        self.read_places[offset] += 1
        ctypes.memmove(data, bytes(self.content[offset : offset + size]), size)
        return 0

    def labels(self) -> list[int]:
        """Return the labels of the records with a header, in the order of their sequence."""
        found = {}
        for slot in range(len(self.content) // self.sector_bytes * 3):
            at = slot // 3 * self.sector_bytes + slot % 3 * RECORD_BYTES
            head = self.content[at : at + 16]
            if head[8:10] != bytes([BLANK] * 2):  # the header was written as a whole
                found[int.from_bytes(head[4:8], "little")] = int.from_bytes(head[8:10], "little")
        return [found[sequence] for sequence in sorted(found)]


class Replay:
    """The library of a model with its replay, as a program on this machine."""

    def __init__(self, model: CompiledModel, folder: Path) -> None:
        model.write(folder)
        tensor = model.quantized.input
        write_manifest(folder, InputFormat(24, 1, 1, float(tensor.scale), tensor.zero), ())
        package = write_library(read_model(folder), Framework.PLATFORMIO, folder / "package")
        shared = folder / "library.so"
        flags = ["-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, *map(str, sorted(package.glob("src/*.c"))), "-o", str(shared)], check=True)
        self.calls, self.engine, self.model = ctypes.CDLL(str(shared)), HostEngine(model), model
        self.calls.port_library_engine.restype = ctypes.c_void_p
        self.start()

    def start(self) -> None:
        assert self.calls.port_library_begin(None) == 0
        self.engine.reset()
        self.engine.set_options(UpdateOptions())

    def begin(self, flash: Flash) -> int:
        return int(self.calls.port_replay_begin(ctypes.byref(flash.memory)))

    def keep(self, sample: np.ndarray, label: int, targets: np.ndarray | None = None) -> int:
        wanted = None if targets is None else targets.ctypes.data_as(ctypes.c_void_p)
        return int(self.calls.port_replay_keep(sample.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint16(label), wanted))

    def train(self, count: int) -> int:
        return int(self.calls.port_replay_train(count, None))

    def parameters(self) -> bytes:
        engine = ctypes.c_void_p(self.calls.port_library_engine())
        self.calls.port_parameters_view.restype = ctypes.c_void_p
        return ctypes.string_at(self.calls.port_parameters_view(engine), self.model.memory.parameters.size_bytes)


def compiled(loss: Loss = Loss.CROSS_ENTROPY, outputs: int = 60) -> CompiledModel:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, outputs)).eval()
    return compile_model(module, (SAMPLES / 50).astype(np.float32), name="replay", loss=loss)


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    return Replay(compiled(), tmp_path_factory.mktemp("replay"))


def test_the_newest_samples_are_kept_over_rounds_and_starts(replay: Replay) -> None:
    flash = Flash()
    assert replay.begin(flash) == 0 and replay.calls.port_replay_count() == 0 and replay.train(5) == 0
    for number in range(50):
        if number % 7 == 0:
            assert replay.begin(flash) == 0
        assert replay.keep(SAMPLES[number], number) == 0
        kept = flash.labels()
        assert kept == list(range(number + 1))[-len(kept) :] and len(kept) >= min(number + 1, 3 * (SECTORS - 1) + 1)
        assert replay.calls.port_replay_count() == len(kept)
    assert flash.faults == 0


def test_what_is_kept_is_trained_to_the_engines_bits(replay: Replay, tmp_path: Path) -> None:
    flash = Flash()
    replay.start()
    assert replay.begin(flash) == 0 and replay.keep(SAMPLES[0], 3) == 0 and replay.train(4) == 0
    for _ in range(4):
        replay.engine.train(SAMPLES[0], 3)
    assert replay.parameters() == replay.engine.parameters
    numbers = Replay(compiled(Loss.MSE, 3), tmp_path)
    targets = np.array([0.5, -0.25, 1.0], np.float32)
    assert numbers.begin(flash) == 0 and numbers.calls.port_replay_count() == 0, "another model's samples"
    assert numbers.keep(SAMPLES[1], 0, targets) == 0 and numbers.train(3) == 0
    for _ in range(3):
        numbers.engine.train(with_targets(SAMPLES[1:2], targets[None], 3)[0], 0)
    assert numbers.parameters() == numbers.engine.parameters
    assert (
        numbers.keep(SAMPLES[1], 0, targets * np.float32(np.inf)) == RANGE and numbers.keep(SAMPLES[1], 0) == ARGUMENT
    )


def test_every_kept_sample_has_its_turn(replay: Replay) -> None:
    flash = Flash()
    replay.start()
    assert replay.begin(flash) == 0
    for number in range(10):
        assert replay.keep(SAMPLES[number], number) == 0
    flash.read_places.clear()
    assert replay.train(2000) == 0
    bodies = [SECTOR_BYTES * (slot // 3) + RECORD_BYTES * (slot % 3) + 16 for slot in range(10)]
    turns = [flash.read_places[place] for place in bodies]
    assert min(turns) > 0.7 * np.mean(turns) and max(turns) < 1.3 * np.mean(turns)


def test_lost_power_loses_what_was_being_written_and_nothing_else(replay: Replay) -> None:
    for start in (2, 5, 11, 26):
        for actions in range(1, 5):
            flash = Flash()
            assert replay.begin(flash) == 0
            for number in range(start):
                assert replay.keep(SAMPLES[number], number) == 0
            before, flash.actions_left = flash.labels(), actions
            cut = replay.keep(SAMPLES[40], 40) != 0
            flash.actions_left = 1 << 30
            assert replay.begin(flash) == 0
            assert replay.calls.port_replay_count() <= len(before) + 1
            for number in (41, 42, 43, 44):
                assert replay.keep(SAMPLES[number], number) == 0
            assert flash.labels()[-4:] == [41, 42, 43, 44] and flash.faults == 0
            assert cut or 40 in flash.labels()
            assert replay.train(20) == 0


def test_damage_is_skipped(replay: Replay) -> None:
    flash = Flash()
    replay.start()
    assert replay.begin(flash) == 0
    for number in range(3):
        assert replay.keep(SAMPLES[number], number) == 0
    flash.content[RECORD_BYTES + 20] ^= 1
    flash.content[30] ^= 1
    assert replay.train(4) == 0
    for _ in range(4):
        replay.engine.train(SAMPLES[2], 2)
    assert replay.parameters() == replay.engine.parameters
    flash.content[2 * RECORD_BYTES] ^= 1
    assert replay.train(4) == 0 and replay.parameters() == replay.engine.parameters


@pytest.mark.parametrize(("sectors", "sector_bytes"), [(1, 4096), (4, 47)])
def test_a_memory_that_cannot_be_a_ring_is_refused(replay: Replay, sectors: int, sector_bytes: int) -> None:
    refused, whole = Flash(sectors, sector_bytes), Flash()
    assert replay.begin(refused) == MEMORY
    assert replay.keep(SAMPLES[0], 0) == MEDIUM and replay.train(1) == 0
    assert replay.begin(whole) == 0 and replay.keep(SAMPLES[0], 60) == RANGE


def test_a_board_that_replays_does_not_forget(replay: Replay) -> None:
    """Classes come one after the other: without replay the first are forgotten, with it all are known."""
    rng = np.random.default_rng(3)
    prototypes = rng.integers(-70, 70, (4, 24))
    labels = np.repeat(np.arange(4), 150)
    rows = np.clip(prototypes[labels] + rng.integers(-20, 20, (600, 24)), -128, 127).astype(np.int8)
    learn: dict[bool, Callable[[int], object]] = {False: lambda count: 0, True: replay.train}
    known = {}
    for replays, again in learn.items():
        replay.start()
        flash = Flash(300)
        assert replay.begin(flash) == 0
        for row, label in zip(rows, labels, strict=True):
            assert (
                replay.calls.port_library_train(row.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint16(int(label)), None)
                == 0
            )
            assert replay.keep(row, int(label)) == 0 and again(4) == 0
        found = [replay.calls.port_library_infer(row.ctypes.data_as(ctypes.c_void_p)) for row in rows]
        known[replays] = np.mean(np.array(found) == labels)
    assert known[True] > 0.9 > 0.8 > known[False]
