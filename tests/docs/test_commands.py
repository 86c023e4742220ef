"""What the documents tell their readers to type is understood, and what README begins with works as it stands."""

from pathlib import Path

import pytest

from port_agent.cli import build_parser
from port_agent.cli.arguments import CommandParser
from port_agent.cli.groups import with_group
from port_agent.cli.settings_file import with_settings_file
from tests.docs.pages import TypedCommand, typed_commands

COMMANDS = tuple(dict.fromkeys(typed_commands()))
FOLDERS = (
    "recordings", "build", "small", "paged", "PROJECT", "examples/imu_gestures", "TinyLlama-1.1B", "SmolLM2-135M", "my-adapter",
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
