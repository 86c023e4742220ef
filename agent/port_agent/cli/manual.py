"""The manual page, and the source of the command line's reference.

Both come from the parser that reads the commands.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArgumentHelp:
    """An option or a positional argument: how it is typed, and what it does."""

    typed: str
    text: str


@dataclass(frozen=True, slots=True)
class ArgumentGroup:
    """Arguments that `--help` lists together."""

    title: str
    text: str
    arguments: tuple[ArgumentHelp, ...]


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """A command: how it is typed, its summary, its description, its arguments, and what `--help` says below them."""

    name: str
    summary: str
    usage: str
    text: str
    groups: tuple[ArgumentGroup, ...]
    epilog: str


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command of this area to `commands`."""
    manual = commands.add_parser(
        "manual", help="print the manual page", description="Print the manual page: port-agent manual | man -l -"
    )
    manual.set_defaults(run=_manual)


def command_helps(parser: argparse.ArgumentParser, summary: str = "") -> Iterator[CommandHelp]:
    """Yield the help of a parser and of all its commands, in the order of `--help`."""
    listed = _sub_commands(parser)
    groups = tuple(
        ArgumentGroup(group.title or "", group.description or "", arguments)
        for group in parser._action_groups
        if (arguments := tuple(_argument(action, parser) for action in group._group_actions if _is_argument(action)))
    )
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    text = (parser.description or "") % {"prog": parser.prog}
    yield CommandHelp(parser.prog, summary, usage, text, groups, parser.epilog or "")
    for name, command in listed.items():
        yield from command_helps(command, _summaries(parser)[name])


def manual_page(parser: argparse.ArgumentParser, version: str) -> str:
    """Return the manual page of the whole command line, section 1, as roff."""
    whole, *commands = command_helps(parser)
    lines = [f'.TH PORT-AGENT 1 "" "port-agent {version}" "User Commands"', ".SH NAME"]
    lines += [
        rf"port\-agent \- {_roff(whole.text[:1].lower() + whole.text[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        _roff(whole.usage),
    ]
    lines += [".SH DESCRIPTION", *_paragraphs(whole.epilog), ".SH COMMANDS"]
    for command in commands:
        lines += [
            f'.SS "{_roff(command.name.removeprefix(whole.name + " "))}"',
            *_paragraphs(command.text or command.summary),
        ]
        lines += [".PP", rf"\fB{_roff(command.usage)}\fR"]
        for group in command.groups:
            lines += _paragraphs(group.text)
            for argument in group.arguments:
                lines += [".TP", rf"\fB{_roff(argument.typed)}\fR", _roff(argument.text) or r"\&"]
        lines += _paragraphs(command.epilog)
    return "\n".join(lines) + "\n"


def _manual(arguments: argparse.Namespace) -> int:
    from port_agent.cli import build_parser
    from port_agent.system import VERSION

    print(manual_page(build_parser(), VERSION), end="")
    return 0


def _sub_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser by name, without aliases."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {name: command for name, command in action.choices.items() if name in _summaries(parser)}
    return {}


def _summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the summaries with which a parser lists its commands."""
    listed = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {choice.dest: choice.help or "" for choice in listed._choices_actions}


def _is_argument(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._SubParsersAction | argparse._HelpAction) or action.help == argparse.SUPPRESS
    return not hidden


def _argument(action: argparse.Action, parser: argparse.ArgumentParser) -> ArgumentHelp:
    formatter = parser._get_formatter()
    return ArgumentHelp(
        formatter._format_action_invocation(action), formatter._expand_help(action) if action.help else ""
    )


def _paragraphs(text: str) -> list[str]:
    """Return a text as roff with its paragraphs separated; indented lines stay lines."""
    lines: list[str] = []
    for paragraph in filter(None, (part.strip("\n") for part in text.split("\n\n"))):
        rows = paragraph.splitlines()
        if any(row.startswith("  ") for row in rows):
            lines += [".PP", ".nf", *map(_roff, rows), ".fi"]
        else:
            lines += [".PP", *map(_roff, rows)]
    return lines


def _roff(text: str) -> str:
    """Return a line of text escaped so that roff shows it unchanged."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
