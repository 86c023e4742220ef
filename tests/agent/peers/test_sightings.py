"""The table of those heard of: who is in it, when they are asked for, when they are gone."""

from itertools import pairwise

import pytest

from port_agent.peers.announcement import Announcement, to_text
from port_agent.peers.sightings import FORGET_S, GONE_S, LIMIT, QUERY_INTERVAL_S, TTL_S, Sightings
from port_agent.peers.state import PublicState

OWN = "00000000000a"


def text(device: str, name: str = "attic") -> bytes:
    return to_text(Announcement(device, name, "board", "1", PublicState.IDLE))


def device(number: int) -> str:
    return f"{number:012x}"


def names(sightings: Sightings, now_s: float) -> list[str]:
    return [peer.announcement.name for peer in sightings.peers(now_s)]


def test_others_are_listed_by_name_and_this_device_is_not() -> None:
    sightings = Sightings(OWN)
    assert sightings.received(device(2), text(device(2), "b"), ("10.0.0.2",), 5.0)
    assert sightings.received(device(1), text(device(1), "c"), (), 6.0)
    assert not sightings.received(OWN, text(OWN), ("10.0.0.1",), 7.0)
    assert not sightings.received(device(3), text(device(4)), (), 7.0), "a record under another's name"
    assert not sightings.received(device(3), b"\xff", (), 7.0)
    assert names(sightings, 7.0) == ["b", "c"]
    sightings.gone(device(2))
    sightings.gone(device(9))
    assert names(sightings, 7.0) == ["c"]


def test_a_record_without_addresses_keeps_the_known_ones() -> None:
    sightings = Sightings(OWN)
    sightings.received(device(1), text(device(1)), ("10.0.0.2",), 5.0)
    sightings.received(device(1), text(device(1)), (), 9.0)
    (peer,) = sightings.peers(9.0)
    assert (peer.addresses, peer.received_s) == (("10.0.0.2",), 9.0)


def test_the_silent_are_asked_for_then_gone_then_asked_ever_more_rarely_then_forgotten() -> None:
    sightings = Sightings(OWN)
    assert sightings.next_s() is None
    sightings.received(device(1), text(device(1)), (), 0.0)
    asked: list[float] = []
    while (now_s := sightings.next_s()) is not None:
        if sightings.to_query(now_s):
            asked.append(now_s)
        assert bool(sightings.peers(now_s)) is (now_s < GONE_S)
    assert 0.7 * TTL_S <= asked[0] < TTL_S
    before = [at for at in asked if at < GONE_S]
    assert len(before) >= 4
    gaps = [after - at for at, after in pairwise(asked)]
    assert gaps == sorted(gaps) and gaps[0] == QUERY_INTERVAL_S
    assert asked[-1] < FORGET_S and len(asked) < 15


def test_one_that_answers_stays_and_one_that_returns_is_listed_again() -> None:
    sightings = Sightings(OWN)
    sightings.received(device(1), text(device(1)), (), 0.0)
    for now_s in range(90, 900, 90):
        assert sightings.peers(float(now_s))
        sightings.received(device(1), text(device(1)), (), float(now_s))
    assert not sightings.peers(900.0 + GONE_S)
    sightings.received(device(1), text(device(1)), (), 1200.0)
    assert sightings.peers(1200.0)


def test_devices_ask_at_different_times() -> None:
    first = set()
    for number in range(15):
        sightings = Sightings(device(number))
        sightings.received(device(99), text(device(99)), (), 0.0)
        first.add(sightings.next_s())
    assert len(first) == 15


@pytest.mark.slow
def test_a_flood_fills_the_table_but_drives_nobody_out_and_dries_up() -> None:
    sightings = Sightings(OWN)
    sightings.received(device(0), text(device(0), "real"), (), 0.0)
    kept = sum(sightings.received(device(100 + n), text(device(100 + n)), (), 1.0) for n in range(5000))
    assert kept == LIMIT - 1
    assert "real" in names(sightings, 2.0)
    sightings.received(device(0), text(device(0), "real"), (), 100.0)
    assert sightings.received(device(1), text(device(1), "late"), (), 1.0 + GONE_S)
    assert names(sightings, 1.0 + GONE_S) == ["late", "real"]
