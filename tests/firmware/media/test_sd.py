"""The driver of SD cards over SPI against a card that speaks the protocol, CRCs included."""

from __future__ import annotations

import ctypes
import random

import pytest

from tests.firmware.media.chips import SdCard, crc7, crc16
from tests.firmware.media.harness import Bus, Transfer, build

pytestmark = pytest.mark.process

MEDIUM_FAILED = 6


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("media"))


def opened(library: ctypes.CDLL, card: SdCard, late: int = 0, tick_us: int = 10) -> Bus:
    bus = Bus(library, card, late, tick_us)
    assert bus.open("sd") == 0 and card.bad_commands == 0
    assert (bus.medium.name, bus.medium.bytes, bus.medium.block_bytes) == (b"sd", 512 * card.blocks, 512)
    return bus


def test_the_cards_checks_are_those_of_the_specification() -> None:
    """Section 4.5 of the Physical Layer Simplified Specification: CMD0, CMD17, and 512 bytes of 0xFF."""
    assert (crc7(bytes([0x40, 0, 0, 0, 0])), crc7(bytes([0x51, 0, 0, 0, 0]))) == (0x95, 0x55)
    assert crc16(b"\xff" * 512) == b"\x7f\xa1"


@pytest.mark.parametrize("high_capacity", [True, False])
@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("count", [4, 512, 516, 5000])
def test_what_was_written_comes_back(library: ctypes.CDLL, high_capacity: bool, late: int, count: int) -> None:
    card, data = SdCard(high_capacity=high_capacity), random.Random(count).randbytes(count)
    bus = opened(library, card, late)
    outcome, polls = bus.write(1024, data)
    assert outcome is Transfer.DONE and polls > 1
    assert card.memory[1024 : 1024 + count] == data and card.written == -(-count // 512)
    assert bus.read(1024, count)[:2] == (Transfer.DONE, data)


def test_no_card_is_an_error(library: ctypes.CDLL) -> None:
    assert Bus(library, SdCard(pulled=True)).open("sd") == MEDIUM_FAILED
    assert Bus(library, SdCard(wakes_after=10**9), tick_us=5000).open("sd") == MEDIUM_FAILED


@pytest.mark.parametrize("at", range(0, 14, 2))
@pytest.mark.parametrize("writes", [True, False])
def test_a_card_pulled_in_the_middle_is_an_error(library: ctypes.CDLL, at: int, writes: bool) -> None:
    card = SdCard()
    bus = opened(library, card, late=1, tick_us=5000)

    def pull(poll: int) -> None:
        card.pulled = poll >= at

    outcome = bus.write(0, bytes(3000), pull)[0] if writes else bus.read(0, 8000, pull)[0]
    assert outcome is Transfer.FAILED


def test_a_bit_turned_on_the_wire_is_an_error(library: ctypes.CDLL) -> None:
    card = SdCard(flips=1)
    bus = opened(library, card)
    assert bus.read(0, 512)[0] is Transfer.FAILED
    assert bus.read(0, 512)[0] is Transfer.DONE


def test_a_card_that_could_not_write_is_an_error(library: ctypes.CDLL) -> None:
    assert opened(library, SdCard(refuses_writes=True)).write(0, b"data")[0] is Transfer.FAILED
    assert opened(library, SdCard(blocks=1024)).read(512 * 2048, 4)[0] is Transfer.FAILED
