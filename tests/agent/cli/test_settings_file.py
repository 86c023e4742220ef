"""Options in a file: each becomes the words that a person would type, and what is typed counts before it."""

from pathlib import Path

import pytest

from port_agent.cli import build_parser
from port_agent.cli.arguments import UsageError
from port_agent.cli.finetune.request import options_of
from port_agent.cli.settings_file import with_settings_file

SETTINGS = """
model = "{0}"
data = ["a.jsonl", "b.jsonl"]
out = "{0}/out"
ram = "600M"
seq_len = 512
lr = 1e-4
rslora = true
submit = false
targets = ["q_proj", "v_proj"]
date = 2026-03-09
"""


def written(folder: Path, text: str) -> str:
    path = folder / "settings.toml"
    path.write_text(text)
    return str(path)


def test_a_file_asks_for_what_its_words_would(tmp_path: Path) -> None:
    path = written(tmp_path, SETTINGS.format(tmp_path))
    words = [
        "finetune",
        str(tmp_path),
        "--data",
        "a.jsonl",
        "--data",
        "b.jsonl",
        "--out",
        f"{tmp_path}/out",
        "--ram",
        "600M",
    ]
    words += ["--seq-len", "512", "--lr", "1e-4", "--rslora", "--targets", "q_proj,v_proj", "--date", "2026-03-09"]
    parser = build_parser(("finetune.command",))
    asked, typed = (parser.parse_args(each) for each in (with_settings_file(["finetune", "--settings", path]), words))
    assert vars(asked) == vars(typed)
    assert options_of(asked) == options_of(typed)


def test_what_is_typed_takes_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    path = written(tmp_path, SETTINGS.format(tmp_path))
    words = with_settings_file(["finetune", f"--settings={path}", "--data", "c.jsonl", "--seq-len=64"])
    arguments = build_parser(("finetune.command",)).parse_args(words)
    assert (arguments.data, arguments.seq_len, arguments.lr) == ([Path("c.jsonl")], 64, 1e-4)


def test_words_without_a_file_stay(tmp_path: Path) -> None:
    words = ["finetune", "m", "--data", "a", "--sample", "--", "x"]
    assert with_settings_file(words) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr = ", "settings.toml is not valid TOML"),
        ("[adapters]\nlora = 8", "adapters is {'lora': 8}; give a text"),
        ('settings = "other"', "has 'settings', which is not an option"),
        ('"--lr" = 1', "has '--lr', which is not an option"),
        ("targets = [true]", "targets is \\[True\\]"),
    ],
)
def test_what_is_no_settings_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        with_settings_file(["finetune", "--settings", written(tmp_path, text)])
    with pytest.raises(UsageError, match="No such file"):
        with_settings_file(["finetune", "--settings", str(tmp_path / "none")])
