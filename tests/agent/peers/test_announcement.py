"""What is announced and what is read of others: golden bytes, hostile records, names that play tricks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from port_agent.peers.announcement import (
    BOARD_LIMIT,
    NAME_LIMIT,
    TEXT_LIMIT_BYTES,
    Announcement,
    AnnouncementError,
    from_text,
    to_text,
)
from port_agent.peers.state import PublicState

OWN = Announcement("0123456789ab", "attic", "Raspberry Pi 5 Model B Rev 1.0", "0.1.0", PublicState.TRAINING)
GOLDEN = b"\x03f=1\x0fid=0123456789ab\x0aname=attic\x24board=Raspberry Pi 5 Model B Rev 1.0\x0dversion=0.1.0\x0estate=training"


def record(*strings: bytes) -> bytes:
    return b"".join(bytes([len(string)]) + string for string in strings)


BASE = (b"f=1", b"id=0123456789ab")


def test_written_and_read_back() -> None:
    assert to_text(OWN) == GOLDEN
    assert from_text(GOLDEN) == OWN


def test_ports_are_numbers_and_what_is_none_is_nothing() -> None:
    shows = replace(OWN, protocol=1, pairing_port=9479)
    assert to_text(shows) == GOLDEN + b"\x0aprotocol=1\x0cpairing=9479" and from_text(to_text(shows)) == shows
    for wrong in (b"pairing=70000", b"pairing=-1", b"pairing=1e3", "pairing=９".encode(), b"pairing=", b"pairing"):
        assert from_text(record(*BASE, wrong)).pairing_port == 0


def test_the_longest_announcement_is_read() -> None:
    longest = Announcement("f" * 12, "ü" * 500, "漢" * 500, "9" * 500, PublicState.PAUSED)
    text = to_text(longest)
    assert len(text) <= TEXT_LIMIT_BYTES
    read = from_text(text)
    assert (read.name, read.board) == ("ü" * NAME_LIMIT, "漢" * BOARD_LIMIT)


@pytest.mark.parametrize("cut", range(1, len(GOLDEN)))
def test_a_record_cut_short_is_refused_or_says_less(cut: int) -> None:
    try:
        read = from_text(GOLDEN[:cut])
    except AnnouncementError:
        return
    assert read.id == OWN.id and (read.name in ("attic", OWN.id)) and read.state is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "format None"),
        (record(b"f=2", b"id=0123456789ab"), "this version reads 1"),
        (record(b"f=1"), "not a valid device id"),
        (record(b"f=1", b"id=0123456789AB"), "not a valid device id"),
        (record(b"f=1", b"id=../../etc/pw"), "not a valid device id"),
        (record(b"f=1", b"id=\xff\xfe"), "not a valid device id"),
        (b"\xfff=1", "beyond the record"),
        (record(*BASE) + b"\x05ab", "ends 3 bytes beyond"),
        (record(*BASE, *[b"x" * 255] * 3), "at most 512"),
    ],
)
def test_what_is_no_announcement(data: bytes, words: str) -> None:
    with pytest.raises(AnnouncementError, match=words):
        from_text(data)


def test_hostile_values_are_tamed() -> None:
    evil = b"name=\x1b[31mroot\x1b]0;x\x07\r\n\x00\xe2\x80\xae\xe2\x80\x8bgpj"
    read = from_text(record(*BASE, evil, b"board=\xff\xfe\x80 pi", b"version", b"state=rm -rf", b"=", b"", b"NAME=2nd"))
    assert read.name == "[31mroot]0;xgpj"
    assert read.board == "��� pi"
    assert (read.version, read.state) == ("", None)


@given(st.binary(max_size=600))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read = from_text(record(*BASE) + data)
    except AnnouncementError:
        return
    for text, limit in ((read.name, NAME_LIMIT), (read.board, BOARD_LIMIT)):
        assert len(text) <= limit and (text == "" or text.isprintable())
