"""Board files: complete, sourced, read back as written; damaged ones are refused."""

import tomllib

import pytest

from port_planner.ir.boards import BoardError, board_names, format_board, load_board, parse_board


@pytest.mark.parametrize("name", board_names())
def test_every_number_has_a_source(name: str) -> None:
    board = load_board(name)
    assert all(len(n.source) > 8 and n.unit and n.value >= 0 for n in board.numbers.values())
    assert board["ram_bytes"] > board["base_bytes"]
    assert "estimated" in board.device().name
    assert parse_board(tomllib.loads(format_board(board)), "again") == board


def test_the_boards_of_the_issue_are_there() -> None:
    wanted = {"mkr1000", "nrf52840", "pi4b", "pi5", "jetson-tx2", "jetson-orin", "apple-m1", "iphone"}
    assert wanted <= set(board_names())


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"value": 1.0, "unit": "W", "kind": "measured"}, "exactly value"),
        ({"value": -1.0, "unit": "W", "kind": "measured", "source": "meter"}, ">= 0"),
        ({"value": 1.0, "unit": "W", "kind": "guessed", "source": "meter"}, "kind"),
        ({"value": 1.0, "unit": "W", "kind": "measured", "source": " "}, "source"),
    ],
)
def test_a_number_without_a_source_is_refused(entry: dict[str, object], reason: str) -> None:
    with pytest.raises(BoardError, match=reason):
        parse_board({"static_watts": entry}, "damaged")


def test_an_unknown_board_lists_the_known() -> None:
    with pytest.raises(BoardError, match="pi4b"):
        load_board("abacus")
