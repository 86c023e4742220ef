"""The manual page has all that `--help` has, as text that roff does not obey."""

import argparse

import pytest

from port_agent.cli import build_parser, main
from port_agent.cli.manual import command_helps, manual_page


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("port-agent", description="Train models.")
    commands = parser.add_subparsers(metavar="COMMAND")
    own = commands.add_parser("own", help="one of ours", epilog="notes:\n  .TH is shown\n\nand a\\b")
    own.add_argument("--size", metavar="SIZE", help="100 %% of it, by default %(default)s", default="3M")
    own.add_argument("--secret", help=argparse.SUPPRESS)
    return parser


def test_helps_are_those_of_the_parser() -> None:
    whole, own = command_helps(make_parser())
    assert (whole.name, whole.text, own.name, own.summary) == (
        "port-agent",
        "Train models.",
        "port-agent own",
        "one of ours",
    )
    (group,) = own.groups
    assert [(argument.typed, argument.text) for argument in group.arguments] == [
        ("--size SIZE", "100 % of it, by default 3M")
    ]


def test_what_looks_like_roff_is_text() -> None:
    page = manual_page(make_parser(), "1.2")
    assert page.startswith('.TH PORT-AGENT 1 "" "port-agent 1.2"')
    assert "\n.TH is" not in page and r"  .TH is shown" in page and r"a\eb" in page
    assert r"port\-agent \- train models" in page


def test_every_command_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manual"]) == 0
    page = capsys.readouterr().out
    commands = list(command_helps(build_parser()))
    assert len(commands) > 50
    assert not [one.name for one in commands if one.name.removeprefix("port-agent ").replace("-", r"\-") not in page]
