"""What the documents tell their readers to type is understood, and what README begins with works as it stands."""

import argparse
import re
from pathlib import Path

import pytest

from port_agent.cli import build_parser
from port_agent.cli.arguments import CommandParser
from port_agent.cli.groups import GROUPS, PLACES, with_group
from port_agent.cli.manual import command_helps
from port_agent.cli.settings_file import with_settings_file
from tests.docs.pages import TypedCommand, named_commands, typed_commands

COMMANDS = tuple(dict.fromkeys(typed_commands()))
FOLDERS = (
    "recordings", "build", "small", "paged", "PROJECT", "examples/imu_gestures", "examples/shakespeare", "TinyLlama-1.1B", "SmolLM2-135M", "my-adapter",
    "notes-adapter", "SmolLM2-135M-Instruct",
)  # fmt: skip


@pytest.fixture(scope="module")
def parser() -> CommandParser:
    return build_parser()


@pytest.fixture
def their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin in a directory that has every file and folder which a command may read."""
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    for command in COMMANDS:
        for word in command.words:
            if Path(word).suffix in (".py", ".port", ".txt", ".jsonl", ".npz", ".safetensors", ".toml"):
                (tmp_path / word).touch()
    (tmp_path / "chats.toml").write_text('model = "SmolLM2-135M"\ndata = "notes.txt"\nout = "mine"\n')
    monkeypatch.chdir(tmp_path)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 60


@pytest.mark.usefixtures("their_folder")
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_each_command_of_the_documents_is_understood(
    command: TypedCommand, parser: CommandParser, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        words = with_settings_file(command.words) if command.words[0] == "finetune" else with_group(command.words)
        arguments = parser.parse_args(words)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert callable(arguments.run)


def why_not(words: tuple[str, ...], parser: argparse.ArgumentParser) -> str:
    """Return why a parser knows no such command, or ""; whatever follows an argument of the
    command is not looked at.
    """
    if words == ("job",):
        return "what follows `job` is the name of a command"
    for word in words:
        below = next(
            (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None
        )
        if word.startswith("-"):
            if word not in parser._option_string_actions:
                return f"{parser.prog} has no option {word}"
        elif below is None:
            return ""
        elif word not in below:
            return f"{parser.prog} has no command {word}"
        else:
            parser = below[word]
    return ""


def test_each_named_command_is_one_by_its_name_of_now(parser: CommandParser) -> None:
    """Messages, docstrings and documents: a name of before is read from a command line, and is advised by nobody."""
    named = dict.fromkeys(named_commands())
    assert len(named) > 200
    wrong = {str(command): why for command in named if (why := why_not(command.words, parser))}
    assert not wrong


def test_each_command_and_each_argument_says_what_it_does(parser: CommandParser) -> None:
    helps = tuple(command_helps(parser))
    assert not [one.name for one in helps if not one.text.endswith((".", "man -l -"))]
    silent = [(one.name, it.typed) for one in helps for group in one.groups for it in group.arguments if not it.text]
    assert not silent


def test_values_have_one_word_each_and_examples_a_line_each(parser: CommandParser) -> None:
    """A usage is at most three lines of 100 characters; an example in a sentence would be run by no test."""
    helps = tuple(command_helps(parser))
    typed = [argument.typed for one in helps for group in one.groups for argument in group.arguments]
    values = {word for each in typed for word in re.findall(r" ([A-Z][A-Z_-]*)(?=[, \]]|$)", each)}
    assert {"SIZE", "FILE", "DIR", "N", "TIME"} <= values
    assert not [value for value in values if "_" in value or (len(value) == 1 and value != "N")]
    assert not [one.name for one in helps if len(one.usage) > 300 or re.search(r"[Ee]xamples?: port-agent", one.epilog)]


def test_each_command_to_type_is_called_by_its_name_of_now() -> None:
    before = [str(command) for command in COMMANDS if command.words[0] in PLACES and command.words[0] not in GROUPS]
    before += [
        str(command) for command in COMMANDS if command.words[:1] == ("job",) and command.words[1] not in GROUPS["job"]
    ]
    assert not before


@pytest.mark.parametrize(
    "wrong", ["submit", "peers", "job 7", "job", "pair --at", "exec --rom", "trian", "peer federate begin"]
)
def test_a_name_of_before_or_of_nothing_is_found(wrong: str, parser: CommandParser) -> None:
    assert why_not(tuple(wrong.split()), parser)
