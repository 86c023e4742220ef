"""Every argument of every command, given as it must not be: one line with cause and remedy, exit code 2, nothing done.

What to try comes from the parsers themselves, by the kind of each argument, so that a new option is
tried without a word here.
"""

import argparse
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from port_agent.cli import build_parser, main
from port_agent.cli.groups import names_before
from port_planner.base.errors import ExitCode
from tests.attack.outcome import AttackOutcome

NUMBERS = (
    "",
    " ",
    "abc",
    "-1",
    "1.5",
    "1e400",
    "nan",
    "inf",
    "0x10",
    "²",
    "1_0",
    "9" * 30,
    "9" * 5000,
    "\x1b[2J",
    "5\n6",
)
QUANTITIES = ("", "abc", "-5", "0", "1e400", "nan", "5 parsecs", "²M", "M", "9" * 5000, "300 M M", "\x1b[2J")
MOMENTS = ("", "abc", "-5", "99999999d", "1e400", "25:00", "2026-13-01", "0001-01-01", "9" * 5000, "5")
WRONG: Mapping[str, Sequence[str]] = {
    "whole_number": NUMBERS, "positive_number": tuple(text for text in (*NUMBERS, "0") if text not in ("1.5", "1_0", "9" * 30)),
    "size": QUANTITIES, "duration": QUANTITIES, "deadline": MOMENTS, "deadline_or_none": MOMENTS,
    "since": (*tuple(text for text in MOMENTS if text != "5"), "2999-01-01"), "hours": MOMENTS,
    "readable_file": ("", "nowhere", "nowhere/x", "folder", "file/x", "loop", "pipe", "x" * 300, "/proc/self/mem", "\x1b[2J"),
    "readable_folder": ("", "nowhere", "file", "file/x", "loop", "pipe", "x" * 300),
    "readable_file_or_folder": ("", "nowhere", "file/x", "loop", "pipe", "x" * 300, "/proc/self/mem"),
    "writable_file": ("", "folder", "nowhere/x", "file/x", "loop/x", "x" * 300, "/proc/x"),
    "writable_folder": ("", "file", "file/x", "loop", "x" * 300, "/proc/x"),
    "host_and_port": ("", ":", "a:b", "a:0", "a:70000", "[fd00::7", "[::1]:x", "a b", "-x", "\x1b[2J", "x" * 300),
}  # fmt: skip
"""By the reader of an argument. Empty is what a shell makes of a variable that is not set."""
JUNK = ("file", "empty", "binary", "json")
"""Files that can be read and are nothing that a command takes."""

GOOD: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("plan",): {"script": "train.py", "ram": "1G"}, ("show",): {"bundle": "job.port"}, ("train",): {"bundle": "job.port"},
    ("draw",): {"bundle": "job.port", "out": "new.svg"}, ("frontier",): {"bundle": "job.port"}, ("submit",): {"bundle": "job.port"},
    ("profile",): {"out": "new.toml"}, ("exec",): {"ram": "1G", "program": "file"},
    ("job",): {"job": "1"}, ("logs",): {"job": "1"}, ("result",): {"job": "1", "output": "new"}, ("feed",): {"job": "1", "files": "file"},
    ("cancel",): {"job": "1"}, ("priority",): {"job": "1", "value": "1"}, ("deadline",): {"job": "1", "when": "8h"},
    ("chat",): {"model": "folder", "ram": "1G"}, ("merge",): {"adapter": "folder", "out": "new"}, ("completion",): {"shell": "bash"}, ("mcu", "compile"): {"project": "model"}, ("mcu", "build"): {"model": "model", "board": "qemu-m4f"},
    ("mcu", "flash"): {"model": "model", "board": "qemu-m4f"}, ("mcu", "train"): {"job": "model"}, ("mcu", "eval"): {"job": "model"},
    ("mcu", "record"): {"model": "model", "inbox": "new"}, ("mcu", "simulate"): {"model": "model"},
}  # fmt: skip
"""What must be there for a command line to be right, by command (grouped ones by their names of before) and name."""


def make_things(folder: Path) -> None:
    """Put files and directories there that are not what is asked for."""
    (folder / "folder").mkdir()
    (folder / "file").write_text("text")
    (folder / "empty").touch()
    (folder / "binary").write_bytes(os.urandom(5000))
    (folder / "json").write_text("[1, {}]")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One command line."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(word if len(word) < 40 else f"{word[:20]}...({len(word)})" for word in self.words)


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield every command with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, (*path, name))
            return
    yield path, parser


def reader_of(action: argparse.Action) -> str:
    """Return the name of what reads an argument, as in `WRONG`; nothing where any text will do."""
    kind = getattr(action.type, "__qualname__", "")
    return kind.partition(".")[0] if kind.partition(".")[0] in WRONG else ""


def attempts() -> Iterator[Attempt]:
    """Yield command lines of which one argument is wrong."""
    for path, parser in commands(build_parser()):
        needed = GOOD.get(path) or GOOD.get(names_before(path)[:1], {})
        for action in parser._actions:
            values = [*WRONG.get(reader_of(action), ()), *(("nonsense", "") if action.choices else ())]
            for value in values:
                yield Attempt((*path, *_words(parser, needed, action, value)))
        if path == ("exec",):
            continue  # what is left over is the program's
        yield Attempt((*path, *_words(parser, needed, None, ""), "--nonsense"))
        yield Attempt((*path, *_words(parser, needed, None, ""), "one", "word", "too", "many", "\x1b[2J"))
        if any(action.required for action in parser._actions):
            yield Attempt(path)


def junk() -> Iterator[Attempt]:
    """Yield command lines that are right but for what is in the files they name."""
    for name in JUNK:
        for words in (
            ("show", name), ("train", name), ("draw", name, "new.svg"), ("frontier", name), ("plan", name, "--ram", "1G"),
            ("energy", "--config", name), ("mcu", "train", name),
            ("mcu", "eval", name), ("mcu", "train", "model", "--data", name), ("boards", name),
        ):  # fmt: skip
            if name == "empty" and "--config" in words:
                continue  # says nothing, which is right
            yield Attempt(words)
    others: tuple[tuple[str, ...], ...] = (

        ("plan", "train.py", "--ram", "1G"), ("mcu", "compile", "model"), ("mcu", "build", "model", "--board", "x"),
        ("mcu", "build", "model", "--board", "qemu-m4f"), ("mcu", "simulate", "model"), ("mcu", "record", "model", "--inbox", "new"),
        ("mcu", "flash", "model", "--board", "pi5"), ("submit", "job.port", "--simulate"), ("submit", "folder"),
        ("submit",), ("submit", "--kind", "mcu"), ("boards", "nonsense"), ("plan", "train.py", "--ram", "1G", "--step-joules", "1"),
        ("show", "job.port", "--plan", "7"), ("train", "job.port", "--plan", "7"), ("draw", "job.port", "new.svg", "--plan", "7"),
        ("pause", "1", "--for", "2h"), ("mcu", "train", "model", "--data", "file"),
    )  # fmt: skip
    yield from map(Attempt, others)


def of_running_agent() -> Iterator[Attempt]:
    """Yield command lines that only a running agent can refuse."""
    for name in ("77", "x", "", "..", "../1", "a/b", "\x1b[2J", "9" * 30, "%00", "?x", "ü"):
        for words in (
            ("job", name), ("logs", name), ("logs", "-f", name), ("result", name, "-o", "new"), ("pause", name), ("resume", name),
            ("cancel", name), ("priority", name, "1"), ("deadline", name, "8h"), ("feed", name, "file"),
        ):  # fmt: skip
            yield Attempt(words)
    for name in JUNK:
        yield Attempt(("submit", name))
        yield Attempt(("submit", "job.port", "--name", f"Not {name}!"))
    for options in (
        ("--epochs", "1", "--steps", "1"),
        ("--data", "folder", "--inbox"),
        ("--name", "x" * 70),
        ("--name", "../x"),
    ):
        yield Attempt(("submit", "job.port", *options))


def _words(
    parser: argparse.ArgumentParser, needed: Mapping[str, str], wrong: argparse.Action | None, value: str
) -> Iterator[str]:
    for action in parser._actions:
        if action is wrong:
            yield from (f"{action.option_strings[-1]}={value}",) if action.option_strings else (value,)
        elif action.dest in needed:
            yield from (
                (action.option_strings[-1], needed[action.dest]) if action.option_strings else (needed[action.dest],)
            )


def run_all(
    name: str,
    tried: Sequence[Attempt],
    folder: Path,
    judge: Callable[[int, str, str], str],
    run: Callable[[Attempt], tuple[int, str, str]],
) -> AttackOutcome:
    """Run command lines in a directory of made things; nothing there may change."""
    before = _inventory(folder)
    harmed = []
    for attempt in tried:
        code, out, said = run(attempt)
        wrong = judge(code, out, said)
        after = _inventory(folder)
        if not wrong and after != before:
            wrong = f"left {sorted(set(after) ^ set(before)) or 'a changed file'}"
            before = after
        if wrong:
            harmed.append(f"{attempt.name}: {wrong}; said {said[:300]!r}")
    return AttackOutcome(name, len(tried), len(tried) - len(harmed), tuple(harmed))


def here(attempt: Attempt) -> tuple[int, str, str]:
    """Run a command line in this process; return exit code, output, and what it said."""
    out, said = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            code = main(attempt.words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException as error:
            return -1, out.getvalue(), f"{type(error).__name__}: {error}"
        finally:
            signal.signal(signal.SIGTERM, handler)
    return code, out.getvalue(), said.getvalue()


def outside(attempt: Attempt) -> tuple[int, str, str]:
    """Run a command line in a process of its own: `exec` becomes the program."""
    command = [sys.executable, "-P", "-m", "port_agent.cli", *attempt.words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
    return done.returncode, done.stdout, done.stderr


def refused(code: int, out: str, said: str) -> str:
    """Return what is wrong with how a wrong input was answered."""
    if code == -1:
        return "a traceback"
    if code not in (ExitCode.IMPOSSIBLE, ExitCode.UNREACHABLE, ExitCode.CONFIG):
        return f"exit code {code}"
    if out:
        return f"output {out[:80]!r}"
    lines = said.splitlines()
    if len(lines) != 1 or not lines[0].startswith("port-agent"):
        return f"{len(lines)} lines"
    if "[Errno" in said or "Traceback" in said or (not said.isprintable() and not said[:-1].isprintable()):
        return "not for people"
    if not re.search(r"; |, or | with |\(|: use ", said):
        return "no remedy"
    return ""


def _inventory(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns if path.is_file() else 0)
    return found
