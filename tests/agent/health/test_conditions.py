"""Health items: declared, damped, explained."""

import string
from typing import Any

import pytest

from port_agent.health.conditions import CONDITIONS, HealthBoard, Severity


def test_every_condition_says_what_and_what_to_do() -> None:
    for condition in CONDITIONS.values():
        assert condition.title and condition.text and condition.remedy, condition.code
        fields = {name for _, name, _, _ in string.Formatter().parse(condition.text) if name}
        in_remedy = {name for _, name, _, _ in string.Formatter().parse(condition.remedy) if name}
        values: dict[str, Any] = dict.fromkeys(fields | in_remedy | {"id", "path"}, "7")
        board = HealthBoard()
        board.report(condition.code, 0.0, 0.0, **values)
        items = board.items(1e6)
        assert len(items) == 1
        assert "{" not in items[0].text + items[0].remedy


def test_an_item_shows_only_after_its_time_and_keeps_its_since() -> None:
    board = HealthBoard()
    board.report("sensor", 100.0, 5000.0, key="cpu", sensor="cpu", reason="EIO")
    assert board.items(110.0) == []
    board.report("sensor", 112.0, 5012.0, key="cpu", sensor="cpu", reason="EINVAL")
    (item,) = board.items(116.0)
    assert (item.since_s, item.since_wall, item.text) == (100.0, 5000.0, "cpu: EINVAL")
    board.clear("sensor", "cpu")
    board.report("sensor", 117.0, 5017.0, key="cpu", sensor="cpu", reason="EIO")
    assert board.items(118.0) == []  # a sensor that comes and goes raises no alarm


def test_the_worst_comes_first_and_passing_events_pass() -> None:
    board = HealthBoard()
    board.report("clock-jumped", 0.0, 0.0, lasts_s=60.0, jump="3 h")
    board.report("config", 1.0, 1.0, reason="x")
    assert [item.severity for item in board.items(2.0)] == [Severity.ERROR, Severity.INFO]
    assert [item.code for item in board.items(61.0)] == ["config"]


def test_what_follows_from_another_trouble_stays_quiet_until_that_is_gone() -> None:
    board = HealthBoard()
    board.report("energy-ledger", 0.0, 0.0, reason="disk full", cure="free some space")
    board.report("state-unwritable", 1.0, 1.0, reason="disk full", path="/var/lib/port-agent")
    assert [item.code for item in board.items(2.0)] == ["state-unwritable"]
    board.clear("state-unwritable")
    (item,) = board.items(3.0)
    assert (item.code, item.remedy, item.since_s) == ("energy-ledger", "free some space", 0.0)


def test_every_condition_is_hidden_by_a_declared_one() -> None:
    for condition in CONDITIONS.values():
        assert CONDITIONS.keys() >= set(condition.hidden_by) and condition.code not in condition.hidden_by


def test_keep_only() -> None:
    board = HealthBoard()
    for key in ("a", "b"):
        board.report("sensor", 0.0, 0.0, key=key, sensor=key, reason="r")
    board.keep_only("sensor", {"b"})
    assert [item.key for item in board.items(100.0)] == ["b"]
    assert board.holds("sensor", "b") and not board.holds("sensor", "a")


def test_an_undeclared_condition_is_an_error() -> None:
    with pytest.raises(KeyError):
        HealthBoard().report("made-up", 0.0, 0.0)
