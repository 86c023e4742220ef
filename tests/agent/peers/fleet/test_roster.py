"""One connection for each device; two that cross leave the same one on both sides."""

from dataclasses import dataclass
from itertools import permutations
from typing import cast

import pytest

from port_agent.peers.connection.link import LinkClosedError, PeerLink
from port_agent.peers.fleet.roster import SILENT_S, Roster
from port_agent.peers.identity.device_id import DeviceId
from tests.agent.peers.devices import HEARTBEAT

SMALL, LARGE = DeviceId(b"\x01" * 32), DeviceId(b"\x02" * 32)


@dataclass(eq=False)
class Line:
    """Stands for a link: what a roster asks of one."""

    end: LinkClosedError | None = None


def link() -> PeerLink:
    return cast(PeerLink, Line())


def arrive(roster: Roster, device: DeviceId, new: PeerLink, *, dialed: bool, now_s: float = 0.0) -> PeerLink | None:
    return roster.arrive(device, new, dialed_by_us=dialed, software="1", now_s=now_s)


@pytest.mark.parametrize("order", [*permutations(range(2))])
@pytest.mark.parametrize("other_order", [*permutations(range(2))])
def test_both_sides_keep_the_same_of_two_that_cross(order: tuple[int, ...], other_order: tuple[int, ...]) -> None:
    by_small, by_large = link(), link()
    kept = []
    for own, other, sequence in ((SMALL, LARGE, order), (LARGE, SMALL, other_order)):
        roster = Roster(own)
        for number in sequence:
            new, dialer = ((by_small, SMALL), (by_large, LARGE))[number]
            arrive(roster, other, new, dialed=dialer == own)
        member = roster.member(other)
        assert member is not None
        kept.append(member.link)
    assert kept == [by_small, by_small]


def test_a_second_call_of_the_same_side_replaces_the_first(tmp_path: object) -> None:
    roster, first, second = Roster(SMALL), link(), link()
    assert arrive(roster, LARGE, first, dialed=False) is None
    assert arrive(roster, LARGE, second, dialed=False) is first, "who calls twice lost the first"
    assert not roster.leave(LARGE, first) and roster.leave(LARGE, second)
    assert roster.member(LARGE) is None and roster.links() == ()


def test_one_that_has_ended_gives_way_to_any() -> None:
    roster, old, new = Roster(SMALL), link(), link()
    arrive(roster, LARGE, old, dialed=True)
    cast(Line, old).end = LinkClosedError("over")
    assert arrive(roster, LARGE, new, dialed=False) is None
    assert roster.links() == (new,)


def test_what_was_heard_outlives_the_connection_and_silence_is_noticed() -> None:
    roster, line = Roster(SMALL), link()
    arrive(roster, LARGE, line, dialed=True, now_s=10.0)
    assert roster.last_heartbeat(LARGE) is None
    assert roster.receive(LARGE, line, HEARTBEAT, 20.0) and not roster.receive(LARGE, line, HEARTBEAT, 30.0)
    assert not roster.receive(LARGE, link(), HEARTBEAT, 40.0), "another connection's word does not count"
    assert roster.silent(30.0 + SILENT_S) == () and roster.silent(30.1 + SILENT_S) == (line,)
    roster.leave(LARGE, line)
    assert roster.last_heartbeat(LARGE) == (30.0, HEARTBEAT)
    assert roster.forget(LARGE) is None and roster.last_heartbeat(LARGE) is None
    arrive(roster, LARGE, line, dialed=True)
    assert roster.forget(LARGE) is line


def test_what_is_no_heartbeat_keeps_a_device_from_being_silent() -> None:
    roster, line = Roster(SMALL), link()
    arrive(roster, LARGE, line, dialed=True)
    roster.notice(LARGE, line, 20.0)
    assert roster.silent(20.0 + SILENT_S) == () and roster.silent(20.1 + SILENT_S) == (line,)
    roster.notice(LARGE, link(), 90.0)
    assert roster.silent(90.0) == (line,), "another connection's word does not count"
    assert roster.last_heartbeat(LARGE) is None
