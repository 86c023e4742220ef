"""Options in a file: each becomes the words that a person would type, and what is typed counts before it."""

from pathlib import Path

import pytest

from port_agent.cli import build_parser
from port_agent.cli.arguments import UsageError
from port_agent.cli.finetune.request import options_of
from port_agent.cli.recipe import with_recipe

RECIPE = """
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


def recipe(folder: Path, text: str) -> str:
    path = folder / "recipe.toml"
    path.write_text(text)
    return str(path)


def test_a_recipe_asks_for_what_its_words_would(tmp_path: Path) -> None:
    path = recipe(tmp_path, RECIPE.format(tmp_path))
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
    asked, typed = (parser.parse_args(each) for each in (with_recipe(["finetune", "--recipe", path]), words))
    assert vars(asked) == vars(typed)
    assert options_of(asked) == options_of(typed)


def test_what_is_typed_takes_the_place_of_what_the_recipe_says(tmp_path: Path) -> None:
    path = recipe(tmp_path, RECIPE.format(tmp_path))
    words = with_recipe(["finetune", f"--recipe={path}", "--data", "c.jsonl", "--seq-len=64"])
    arguments = build_parser(("finetune.command",)).parse_args(words)
    assert (arguments.data, arguments.seq_len, arguments.lr) == ([Path("c.jsonl")], 64, 1e-4)


def test_words_without_a_recipe_stay(tmp_path: Path) -> None:
    words = ["finetune", "m", "--data", "a", "--sample", "--", "x"]
    assert with_recipe(words) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr = ", "recipe.toml is not valid TOML"),
        ("[adapters]\nlora = 8", "adapters is {'lora': 8}; give a text"),
        ('recipe = "other"', "has 'recipe', which is no option's name"),
        ('"--lr" = 1', "has '--lr', which is no option's name"),
        ("targets = [true]", "targets is \\[True\\]"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        with_recipe(["finetune", "--recipe", recipe(tmp_path, text)])
    with pytest.raises(UsageError, match="No such file"):
        with_recipe(["finetune", "--recipe", str(tmp_path / "none")])
