"""The documents and messages for people, and what they tell them to type."""

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from port_agent.cli import SHORT_HELP, build_parser
from port_agent.cli.groups import GROUPS, PLACES
from port_agent.cli.manual import command_helps
from tests.house import parse, product_files

ROOT = Path(__file__).parents[2]
LANGUAGES_OF_COMMANDS = ("", "sh", "console")
"""Of the fenced blocks that a reader types into a shell; others are code, settings or output."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class TypedCommand:
    """A line that a document tells its reader to type: its words without comment, and the document's path."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """Return the Markdown documents of the site and of the repository's front page."""
    own = [ROOT / name for name in ("README.md", "deploy/README.md", "SECURITY.md", "CONTRIBUTING.md")]
    return [*own, *sorted((ROOT / "docs").rglob("*.md"))]


def documents() -> list[Path]:
    """Return all documents for people but the figures of benchmarks."""
    further = (
        "ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "benchmarks/README.md", "firmware/PROTOCOL.md", "firmware/ports/PORTING.md",
        "planner/port_planner/milp/FORMULATION.md", "planner/port_planner/torch_compat/decided/README.md",
        "agent/port_agent/energy/README.md", "examples/imu_gestures/README.md",
    )  # fmt: skip
    return [*pages(), *(ROOT / name for name in further)]


def sentences(page: Path) -> Iterator[str]:
    """Yield the parts of a page's prose between full stops, colons and semicolons, code as one word; without tables."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    prose = "\n".join(line for line in text.splitlines() if not re.match(r"\s*\||    |#|!\[", line))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", prose):
        flat = re.sub(r"`[^`]*`", "X", re.sub(r"\s+", " ", paragraph))
        flat = re.sub(r"\([^()]*\)", "", re.sub(r"\]\([^)]*\)", "]", flat))
        yield from re.split(r"(?<=[.!?:;])\**\s+", flat)


def blocks(page: Path, languages: tuple[str, ...]) -> list[str]:
    """Return the fenced blocks of a page that are written in one of these languages."""
    return [text for language, text in _FENCE.findall(page.read_text()) if language in languages]


def typed_commands() -> Iterator[TypedCommand]:
    """Yield each `port-agent` line of the documents and of `--help`; a shell's `&` and `sudo` are not part of it."""
    for page in pages():
        for block in blocks(page, LANGUAGES_OF_COMMANDS):
            for line in block.splitlines():
                words = [word for word in shlex.split(line, comments=True) if word not in ("&", "sudo")]
                if words[:1] == ["port-agent"]:
                    yield TypedCommand(str(page.relative_to(ROOT)), tuple(words[1:]))
    for title, text in (("--help", SHORT_HELP), *((one.name, one.epilog) for one in command_helps(build_parser()))):
        for line in re.findall(r"^  (port-agent .*?)(?:\s{3,}.*|\s#.*)?$", text, re.M):
            if "..." not in line and " COMMAND" not in line:
                yield TypedCommand(f"{title} --help", tuple(shlex.split(line)[1:]))


def named_commands() -> Iterator[TypedCommand]:
    """Yield each command that a message, docstring, document or shipped file names, with the
    options that follow it at once.

    Prose such as "port-agent runs as" is left out, and so is the one text that lists the names of before.
    """
    known = {*GROUPS, *PLACES, *(name for one in command_helps(build_parser()) for name in one.name.split()[1:2])}
    for path, text in _texts():
        for words in re.findall(rf"`((?:{'|'.join(PLACES)}) [a-z-][^`]*)`", text):
            if words.split()[0] not in GROUPS:
                yield TypedCommand(str(path.relative_to(ROOT)), tuple(words.split()))
        for mark, words in re.findall(
            r"(`?)\bport-agent((?: -{0,2}[a-z][a-z-]*\b(?![./=]))+)", re.sub(r"\s*\n\s*", " ", text)
        ):
            if mark or words.split()[0] in known:
                yield TypedCommand(str(path.relative_to(ROOT)), tuple(words.split()))


def _texts() -> Iterator[tuple[Path, str]]:
    """Yield texts for people with the files that they stand in; lines to type are left to `typed_commands`."""
    for path in documents():
        yield path, re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for folder in ("deploy", "systemd", "agent/port_agent"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".c", ".h", ".sh", ".toml", ".conf", ".html", ".js"):
                yield from ((path, line) for line in path.read_text().splitlines())
    for path in product_files():
        if "port-agent" in path.read_text():
            yield from ((path, text) for text in _strings(parse(path)) if "by their names before" not in text)


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module; values within one are written as `{}`."""
    within: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            within.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in within:
            yield node.value


def linked(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield the links of a page to other files: as written, the file, and the heading in it or ""."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("http://", "https://")):
            file, _, heading = target.partition("#")
            yield target, (page.parent / file).resolve() if file else page, heading


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@contextmanager
def script(name: str) -> Iterator[ModuleType]:
    """Import a script of docs/ for a while; afterwards neither it nor its folder is known."""
    before, folder = set(sys.modules), str(ROOT / "docs")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        for module in set(sys.modules) - before:
            if str(getattr(sys.modules[module], "__file__", "")).startswith(folder):
                del sys.modules[module]
