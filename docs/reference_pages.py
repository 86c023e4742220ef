"""The pages of the reference that code writes: commands, functions, settings, exit codes, formats and protocols.

Nothing is imported but the command line's parser: the rest is read from the sources, so that torch need not be there.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from port_agent.cli import build_parser
from port_agent.cli.manual import ArgumentGroup, CommandHelp, command_helps

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"port_agent": ROOT / "agent", "port_planner": ROOT / "planner"}


@dataclass(frozen=True, slots=True)
class Format:
    """A file or protocol with a number of its own: where the number stands in the source, and where it is described."""

    title: str
    source: str
    pattern: str
    meaning: str


FORMATS = (
    Format("bundle", "planner/port_planner/ir/bundle/manifest.py", r"^[A-Z_]*FORMAT = (\d+)", "a planned job, `*.port`: a zip archive with graph, costs, plans, weights and data"),
    Format("plans made again", "planner/port_planner/ir/bundle/revision.py", r"^_FORMAT = (\d+)", "beside a job's bundle, made while it trains"),
    Format("checkpoint", "agent/port_agent/training/state/checkpoint.py", r"_VERSIONS = \(([\d, ]+)\)", "a job's state, from which a killed run resumes"),
    Format("job record", "agent/port_agent/jobs/job.py", r"^RECORD_VERSION = (\d+)", "a row of the job store"),
    Format("energy ledger", "agent/port_agent/energy/ledger.py", r"^SCHEMA_VERSION = (\d+)", "`energy.sqlite` in the state directory; older ones are read and brought up to date"),
    Format("control socket", "agent/port_agent/control/http_answers.py", r"^API_VERSION = (\d+)", "HTTP and JSON over a Unix socket: what the commands speak with the daemon"),
    Format("worker", "agent/port_agent/worker/protocol.py", r"^VERSION = (\d+)", "lines of JSON between the daemon and its workers"),
    Format("peers", "agent/port_agent/peers/connection/messages.py", r"NEWEST_VERSION = ([\d, ]+)", "messages between paired devices, over TLS 1.3: the oldest and the newest that are spoken"),
    Format("boards", "firmware/protocol/messages.h", r"PROTOCOL_VERSION (\d+)u", "frames on the serial line to a microcontroller: [the protocol](../../firmware/PROTOCOL.md)"),
)  # fmt: skip


def commands() -> str:
    """Return the page of the command line, from its parser."""
    whole, *others = command_helps(build_parser())
    parts = [f"# Commands\n\n{whole.text}\n\n```text\n{whole.usage}\n```\n", _groups(whole.groups)]
    parts.append(
        "The same as a manual page: `port-agent manual | man -l -`. Completion: `port-agent completion bash`.\n"
    )
    for command in others:
        level = "#" * min(command.name.count(" ") + 1, 4)
        parts.append(f"{level} {command.name}\n\n{_command(command)}")
    return "\n".join(parts)


def functions() -> str:
    """Return the page of the public functions and classes, from their sources."""
    package = ast.parse((PACKAGES["port_agent"] / "port_agent" / "__init__.py").read_text())
    homes: dict[str, str] = next(
        ast.literal_eval(node.value)
        for node in package.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES"
    )
    parts = [f"# Functions and classes\n\n{_paragraphs(ast.get_docstring(package) or '')}\n"]
    for name, home in sorted(homes.items(), key=lambda item: (item[0][0].isupper(), item[0])):
        node = _definition(home, name)
        parts.append(f"## {name}\n\n```python\nfrom port_agent import {name}\n```\n\n{_documented(node)}")
    return "\n".join(parts)


def settings() -> str:
    """Return the page of the configuration, from the file that is shipped, which shows every
    setting with its default.
    """
    parts = [
        "# Settings\n"
        "\n"
        "Of `/etc/port-agent/config.toml`, and of `config.d/*.toml`, read after it. `port-agent reload` applies "
        "changes.\n"
    ]
    section = ""
    rows: list[tuple[str, str, str]] = []
    for line in (ROOT / "deploy" / "config.toml").read_text().splitlines():
        if head := re.match(r"#? ?\[([\w.]+)\]\s*#?\s*(.*)", line):
            parts += [_settings_table(section, rows)] if rows else []
            section, rows = head[1], []
        elif setting := re.match(r"# (\w+) = (.+?)\s*(?:#\s+(.*))?$", line):
            rows.append((setting[1], setting[2], setting[3] or ""))
        elif rows and (more := re.match(r"#\s+#?\s{2,}(.*)|\s+#\s+(.*)", line)):
            name, value, text = rows[-1]
            rows[-1] = name, value, f"{text} {more[1] or more[2]}"
    return "\n".join([*parts, _settings_table(section, rows)])


def exit_codes() -> str:
    """Return the page of exit codes, from the enumeration."""
    node = _definition("port_planner.base.errors", "ExitCode")
    assert isinstance(node, ast.ClassDef)
    rows = [f"| {value} | {name} | {text} |" for name, value, text in _members(node)]
    return "\n".join(
        ["# Exit codes\n", "They never change.\n", "| code | name | meaning |", "|---|---|---|", *rows, ""]
    )


def formats() -> str:
    """Return the page of file formats and protocols with the numbers that this version writes."""
    rows = []
    for form in FORMATS:
        numbers = re.findall(form.pattern, (ROOT / form.source).read_text(), re.M)
        versions = sorted(int(number) for found in numbers for number in found.split(", "))
        shown = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else str(versions[0])
        rows.append(f"| {form.title} | {shown} | {form.meaning} | `{form.source}` |")
    text = (
        "# Formats and protocols\n"
        "\n"
        "Each has a number of its own, which changes when the format does, not with the version of the program. Where "
        "several are named, all are read, and each file has the oldest that holds what is in it. Newer ones are "
        "refused by their number.\n"
    )
    return "\n".join([text, "| | version | what it is | source |", "|---|---|---|---|", *rows, ""])


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "functions": functions,
    "settings": settings,
    "exit-codes": exit_codes,
    "formats": formats,
}
"""What writes each page of docs/reference."""


def _command(command: CommandHelp) -> str:
    text = command.text or f"{command.summary[:1].upper()}{command.summary[1:]}."
    epilog = f"```text\n{command.epilog.strip()}\n```\n" if command.epilog else ""
    return "\n".join([f"{_paragraphs(text)}\n", f"```text\n{command.usage}\n```\n", _groups(command.groups), epilog])


def _groups(groups: tuple[ArgumentGroup, ...]) -> str:
    parts = []
    for group in groups:
        title = "" if group.title in ("options", "positional arguments") else f"**{group.title.capitalize()}**\n\n"
        about = f"{_paragraphs(group.text)}\n\n" if group.text else ""
        rows = "".join(f"`{argument.typed}`\n: {_text(argument.text) or '-'}\n\n" for argument in group.arguments)
        parts.append(f"{title}{about}{rows}")
    return "\n".join(parts)


def _settings_table(section: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| `{name}` | `{value}` | {_text(text)} |" for name, value, text in rows]
    return "\n".join([f"## {section}\n", "| setting | default | meaning |", "|---|---|---|", *lines, ""])


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the class or function of this name, from the source of the module that defines it."""
    package, _, rest = module.partition(".")
    path = PACKAGES[package] / package / f"{rest.replace('.', '/')}.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and name in (alias.name for alias in node.names):
            return _definition(node.module, name)
    raise LookupError(f"{module} defines no {name}")


def _documented(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return signature, docstring, fields and public methods of a class or function."""
    text = _paragraphs(ast.get_docstring(node) or "")
    if isinstance(node, ast.FunctionDef):
        return f"```python\n{_signature(node)}\n```\n\n{text}\n"
    parts = [f"{text}\n"]
    rows = [f"| `{name}` | `{kind}` | {doc} |" for name, kind, doc in _fields(node)]
    parts += ["| field | type and default | meaning |\n|---|---|---|", *rows, ""] if rows else []
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            parts.append(f"```python\n{_signature(method)}\n```\n\n{_paragraphs(ast.get_docstring(method) or '')}\n")
    return "\n".join(parts)


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({ast.unparse(node.args)}){returns}"
    return line if len(line) < 100 else re.sub(r", (?=\w+:)", ",\n    ", line)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield the annotated fields of a class: name, type with default, and the string behind it."""
    for position, item in enumerate(node.body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            default = f" = {ast.unparse(item.value)}" if item.value else ""
            kind = f"{ast.unparse(item.annotation)}{default}".replace("|", "\\|")
            yield item.target.id, kind, _string_after(node, position)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield the members of an enumeration: name, value, and the string behind it."""
    for position, item in enumerate(node.body):
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            yield item.targets[0].id, ast.unparse(item.value), _string_after(node, position)


def _string_after(node: ast.ClassDef, position: int) -> str:
    following = node.body[position + 1] if position + 1 < len(node.body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return _text(re.sub(r"\s+", " ", str(following.value.value)))
    return ""


def _paragraphs(text: str) -> str:
    return "\n\n".join(_text(" ".join(part.split())) for part in text.split("\n\n"))


def _text(text: str) -> str:
    """Return prose as Markdown: what stands outside of backquotes is text, no markup."""
    parts = text.split("`")
    plain = [
        re.sub(r"([*_<>\[\]|#])", r"\\\1", part) if index % 2 == 0 else part.replace("|", "\\|")
        for index, part in enumerate(parts)
    ]
    return "`".join(plain) if len(parts) % 2 else plain[0] + "".join(f"\\`{part}" for part in plain[1:])
