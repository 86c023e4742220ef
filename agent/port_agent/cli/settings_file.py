"""A command's options from a TOML file (`--settings FILE`), inserted before the typed words, which override them."""

import argparse
import datetime
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from port_agent.cli.arguments import UsageError
from port_planner.base.units import shown

SETTINGS = "--settings"

_POSITIONAL = "model"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_REPEATED = frozenset(("data", "valid"))
"""Options that are repeated for each value; several values of any other option become one word with commas."""


def with_settings_file(words: Sequence[str]) -> list[str]:
    """Return a command's words with the options of its settings files in front, except options that are typed.

    Raises UsageError for a file that does not contain options.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(SETTINGS, action="append", default=[], type=Path)
    found, rest = finder.parse_known_args(list(words))
    typed = {word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")}
    options = [word for path in found.settings for word in _words(path, typed)]
    return [*rest[:1], *options, *rest[1:]]


def _words(path: Path, typed: set[str]) -> Iterator[str]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a TOML file of options") from error
    except ValueError as error:  # covers invalid TOML and invalid UTF-8
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    for key, value in entries.items():
        name = key.replace("_", "-")
        if not _NAME.fullmatch(key) or f"--{name}" == SETTINGS:
            raise UsageError(
                f"{path} has {shown(key)}, which is not an option; use the names of --help without their dashes"
            )
        if name not in typed:
            yield from _option(path, name, value)


def _option(path: Path, name: str, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield from [f"--{name}"] * value
        return
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float | datetime.date) and not isinstance(each, bool) for each in values):
        raise UsageError(f"{path}: {name} is {value!r}; give a text, a number, true or false, or a list of texts")
    texts = [str(each) for each in values]
    if name == _POSITIONAL:
        yield from texts
    elif name in _REPEATED:
        yield from (f"--{name}={each}" for each in texts)
    else:
        yield f"--{name}={','.join(texts)}"
