"""Introductions as bytes: read as sent, anything else refused."""

import random

import pytest

from port_agent.peers.introductions import INTRODUCTIONS, IntroducedDevice, IntroductionError, Introductions


def test_they_come_back_as_they_went_and_have_bounds() -> None:
    one = IntroducedDevice(certificate=b"0\x03abc", name="attic", address=("10.0.0.2", 9478))
    assert INTRODUCTIONS.decode(INTRODUCTIONS.encode(Introductions((one,)))).devices == (one,)
    for wrong in (
        Introductions((one,) * 101),
        Introductions((IntroducedDevice(certificate=b"x" * 5000, name="a"),)),
        Introductions((IntroducedDevice(certificate=b"x", name="a" * 41),)),
        Introductions((IntroducedDevice(certificate=b"x", name="a", address=("", 9478)),)),
        Introductions((IntroducedDevice(certificate=b"x", name="a", address=("10.0.0.2", 70_000)),)),
    ):
        with pytest.raises(IntroductionError, match="not a list of introductions"):
            INTRODUCTIONS.decode(INTRODUCTIONS.encode(wrong))


def test_fuzzed_bytes_are_read_or_refused() -> None:
    numbers = random.Random(7)
    good = INTRODUCTIONS.encode(Introductions((IntroducedDevice(certificate=b"0\x03abc", name="attic"),)))
    for _ in range(2000):
        content = bytearray(good)
        content[numbers.randrange(len(content))] = numbers.randrange(256)
        try:
            found = INTRODUCTIONS.decode(bytes(content[: numbers.randrange(1, len(content) + 1)]))
        except IntroductionError:
            continue
        assert len(found.devices) <= 100
