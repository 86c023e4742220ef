"""Commands below one word, and their names of before."""

import argparse

import pytest

from port_agent.cli import AREAS, SHORT_HELP, build_parser, main
from port_agent.cli.groups import GROUPS, PLACES, GroupedCommands, names_before, with_group


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("submit a.port", "job submit a.port"),
        ("jobs --all", "job list --all"),
        ("job 7 --json", "job show 7 --json"),
        ("job --runtime-dir r 7", "job show --runtime-dir r 7"),
        ("job pause 7", "job pause 7"),
        ("job --help", "job --help"),
        ("job", "job"),
        ("peers", "peer list"),
        ("peer pair 1234", "peer pair 1234"),
        ("federate start x", "peer federate start x"),
        ("status", "status"),
        ("", ""),
    ],
)
def test_names_of_before_are_read(typed: str, read: str) -> None:
    assert with_group(typed.split()) == read.split()


def test_every_grouped_command_is_some_areas() -> None:
    known = {name for commands in AREAS.values() for name in commands}
    assert set(PLACES) <= known
    assert sum(map(len, GROUPS.values())) == len(PLACES)


def test_a_group_may_mean_all_of_its_commands() -> None:
    assert names_before(["peer", "pair"]) == ("pair",)
    assert names_before(["peer", "--help"]) == tuple(GROUPS["peer"].values())
    assert names_before(["status"]) == ("status",) and names_before([]) == ()


def test_commands_stand_below_their_group() -> None:
    parser = argparse.ArgumentParser("port-agent")
    commands = GroupedCommands(parser.add_subparsers())
    commands.add_parser("pause").set_defaults(run="pause")
    commands.add_parser("status").set_defaults(run="status")
    assert parser.parse_args(["job", "pause"]).run == "pause"
    assert parser.parse_args(["status"]).run == "status"


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["--help-all"]])
def test_help_is_short_and_all_of_it_is_there(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert (shown == SHORT_HELP and len(shown.splitlines()) <= 24) == (words != ["--help-all"])
    assert words != ["--help-all"] or shown == build_parser().format_help()
