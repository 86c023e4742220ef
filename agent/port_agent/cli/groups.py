"""Group related commands under one word: `port-agent job pause`. Their names from before 0.2 still work."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

GROUPS: Mapping[str, Mapping[str, str]] = {
    "job": {
        "submit": "submit",
        "list": "jobs",
        "show": "job",
        "logs": "logs",
        "result": "result",
        "feed": "feed",
        "pause": "pause",
        "resume": "resume",
        "run-now": "run-now",
        "cancel": "cancel",
        "priority": "priority",
        "deadline": "deadline",
        "recall": "recall",
    },
    "peer": {"list": "peers", "pair": "pair", "unpair": "unpair", "federate": "federate", "identity": "identity"},
}
"""Groups, each with its commands by their old names, under which their areas add them."""

SUMMARIES: Mapping[str, str] = {
    "job": "submit jobs to the agent, watch and control them, and fetch their results",
    "peer": "pair devices that train together",
}
EXAMPLES: Mapping[str, str] = {
    "job": "examples:\n"
    "  port-agent job submit job.port --epochs 3\n"
    "  port-agent job list\n"
    "  port-agent job result job -o weights.safetensors\n",
    "peer": "examples:\n"
    "  port-agent peer pair                shows a code\n"
    "  port-agent peer pair CODE           on the other device\n"
    "  port-agent peer list\n",
}
PLACES: Mapping[str, tuple[str, str]] = {
    before: (group, name) for group, commands in GROUPS.items() for name, before in commands.items()
}
"""Group and new name of a command, by its old name."""
_HELP = ("-h", "--help")


class GroupedCommands:
    """Receives the commands that areas add, and puts each into its group."""

    def __init__(self, commands: "argparse._SubParsersAction[Any]") -> None:
        self._commands = commands
        self._groups: dict[str, argparse._SubParsersAction[Any]] = {}

    def add_parser(self, name: str, **options: Any) -> Any:
        """Add a command as argparse does, in its group if it has one."""
        group, own_name = PLACES.get(name, ("", name))
        return (self._of(group) if group else self._commands).add_parser(own_name, **options)

    def _of(self, group: str) -> "argparse._SubParsersAction[Any]":
        if group not in self._groups:
            parser = self._commands.add_parser(group, help=SUMMARIES[group], epilog=EXAMPLES[group])
            self._groups[group] = parser.add_subparsers(dest=f"{group}_command", metavar="COMMAND", required=True)
        return self._groups[group]


def with_group(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with the group inserted if the command was called by its old name."""
    first, rest = (words[0], list(words[1:])) if words else ("", [])
    if first in GROUPS:
        is_before = first in PLACES and rest and rest[0] not in GROUPS[first] and rest[0] not in _HELP
        return [first, PLACES[first][1], *rest] if is_before else [first, *rest]
    return [*PLACES[first], *rest] if first in PLACES else list(words)


def names_before(words: Sequence[str]) -> tuple[str, ...]:
    """Return the old names of the commands that a grouped command line may mean."""
    if not words:
        return ()
    commands = GROUPS.get(words[0])
    if commands is None:
        return (words[0],)
    chosen = commands.get(words[1]) if len(words) > 1 else None
    return (chosen,) if chosen else tuple(commands.values())
