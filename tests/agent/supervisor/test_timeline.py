"""The timeline has a line for each change, outlives cuts, and stays small."""

from pathlib import Path

import pytest

from port_agent.policy.decide import Memory, PolicyDecision, State
from port_agent.supervisor.timeline import FILE_NAME, FREE, KEPT_S, MAX_BYTES, TRAINING, Timeline

NIGHT = 1_800_000_000.0


def decision(state: State, *reasons: str) -> PolicyDecision:
    return PolicyDecision(state, reasons, tuple(reason.split()[0] for reason in reasons), Memory())


TRAIN = decision(State.TRAIN, "go")


def texts(timeline: Timeline, since: float = 0.0) -> list[str]:
    return [entry.text for entry in timeline.since(since)]


def test_a_night_is_told_in_its_changes(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    night = [
        (0, decision(State.LEAVE, "battery 64 %"), False),
        (1, decision(State.LEAVE, "battery 63 %"), False),  # the same, with another figure
        (2, TRAIN, False),
        (3, TRAIN, True),
        (4, decision(State.PAUSE, "hot 76 C", "idle 3 s"), True),
        (5, TRAIN, True),
    ]
    for hour, made, busy in night:
        timeline.take(NIGHT + 3600 * hour, made, busy=busy)
    told = ["battery 64 %", FREE, TRAINING, "hot 76 C; idle 3 s", TRAINING]
    assert texts(timeline) == told
    timeline.flush(NIGHT)
    assert not timeline.pending and texts(Timeline(tmp_path)) == told
    assert texts(timeline, NIGHT + 3.5 * 3600) == told[2:], "what was so at that moment comes first"


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    for number in range(3):
        timeline.note(NIGHT + number, str(number))
        timeline.flush(NIGHT)
    lines = (tmp_path / FILE_NAME).read_bytes().split()
    (tmp_path / FILE_NAME).write_bytes(b"\n".join([lines[0], lines[1][:7], b"\xff{}", lines[2]]))
    assert texts(Timeline(tmp_path)) == ["0", "2"]


def test_a_cut_in_the_last_line_costs_the_next_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b'[1.0,"wh')
    timeline = Timeline(tmp_path)
    timeline.note(NIGHT, "after")
    timeline.flush(NIGHT)
    assert texts(Timeline(tmp_path)) == ["after"]


def test_a_month_in_few_bytes(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.note(NIGHT - KEPT_S - 1, "older than a month")
    for number in range(MAX_BYTES // 100):
        timeline.note(NIGHT + number, f"{number:100}")
    timeline.flush(NIGHT)
    assert (tmp_path / FILE_NAME).stat().st_size <= MAX_BYTES
    kept = texts(Timeline(tmp_path))
    assert kept[-1].strip() == str(MAX_BYTES // 100 - 1) and "older" not in kept[0]


def test_what_the_disk_refuses_is_kept(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "absent")
    timeline.note(NIGHT, "first")
    with pytest.raises(OSError):
        timeline.flush(NIGHT)
    assert timeline.pending and texts(timeline) == ["first"]


def test_after_a_note_it_is_said_again_what_is_so(tmp_path: Path) -> None:
    """Else the rest of the night would be told as what was noted: that the machine slept, or what the user wished."""
    timeline = Timeline(tmp_path)
    timeline.take(NIGHT, TRAIN, busy=True)
    timeline.take(NIGHT + 10, TRAIN, busy=True)
    timeline.note(NIGHT + 20, "the machine slept for 7 h 00 min")
    timeline.take(NIGHT + 30, TRAIN, busy=True)
    timeline.take(NIGHT + 40, TRAIN, busy=True)
    assert texts(timeline) == [TRAINING, "the machine slept for 7 h 00 min", TRAINING]
