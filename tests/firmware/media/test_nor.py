"""The driver of serial NOR flash against a chip that speaks its command set."""

from __future__ import annotations

import ctypes
import random

import pytest

from tests.firmware.media.chips import NorFlash
from tests.firmware.media.harness import Bus, Transfer, build

pytestmark = pytest.mark.process

MEDIUM_FAILED = 6


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("media"))


def opened(library: ctypes.CDLL, chip: NorFlash, late: int = 0, tick_us: int = 10) -> Bus:
    bus = Bus(library, chip, late, tick_us)
    assert bus.open("nor") == 0
    assert (bus.medium.name, bus.medium.bytes, bus.medium.block_bytes) == (b"nor", 1 << chip.size_code, 4096)
    return bus


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("count", [4, 252, 256, 260, 4096, 9000])
def test_what_was_written_comes_back(library: ctypes.CDLL, late: int, count: int) -> None:
    chip, data = NorFlash(), random.Random(count).randbytes(count)
    bus = opened(library, chip, late)
    for _ in range(2):  # a sector must be erased before it is written again
        outcome, polls = bus.write(8192, data)
        assert outcome is Transfer.DONE and polls > 1  # it never waits for the chip itself
        assert bus.read(8192, count)[:2] == (Transfer.DONE, data)
        data = bytes(byte ^ 0xFF for byte in data)
    assert chip.erases == 2 * -(-count // 4096) and chip.programs == 2 * -(-count // 256)


def test_only_the_sectors_of_the_page_are_touched(library: ctypes.CDLL) -> None:
    chip = NorFlash()
    chip.memory[:] = bytes(i % 251 for i in range(len(chip.memory)))
    before = bytes(chip.memory)
    assert opened(library, chip).write(4096, b"x" * 100)[0] is Transfer.DONE
    assert chip.memory[:4096] == before[:4096] and chip.memory[8192:] == before[8192:]


def test_no_chip_is_an_error(library: ctypes.CDLL) -> None:
    assert Bus(library, NorFlash(pulled=True)).open("nor") == MEDIUM_FAILED


@pytest.mark.parametrize("at", range(0, 30, 3))
def test_a_chip_pulled_while_it_is_written_is_an_error(library: ctypes.CDLL, at: int) -> None:
    chip = NorFlash()

    def pull(poll: int) -> None:
        chip.pulled = poll >= at

    bus = opened(library, chip)
    assert bus.write(0, bytes(2000), pull)[0] is Transfer.FAILED
    chip.pulled = False
    chip._busy = 0
    assert bus.write(0, b"again" * 4)[0] is Transfer.DONE and bus.read(0, 20)[1] == b"again" * 4


def test_a_chip_pulled_while_it_is_read_is_an_error(library: ctypes.CDLL) -> None:
    chip = NorFlash()
    bus = opened(library, chip, late=2)

    def pull(poll: int) -> None:
        chip.pulled = True

    assert bus.read(0, 100, pull)[0] is Transfer.FAILED
    assert bus.read(0, 100)[0] is Transfer.FAILED


def test_a_chip_that_stays_busy_or_is_write_protected_is_an_error(library: ctypes.CDLL) -> None:
    assert opened(library, NorFlash(busy_polls=10**9), tick_us=5000).write(0, b"data")[0] is Transfer.FAILED
    assert opened(library, NorFlash(protected=True)).write(0, b"data")[0] is Transfer.FAILED
