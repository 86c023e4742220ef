"""The form of all help texts: a short usage line, one word for each kind of argument, examples ready to be typed."""

import argparse
import pathlib
from typing import Any

MAX_OPTIONS = 8
"""Largest number of options that a usage line lists; more become `[options]`, except required ones."""

_NOUNS = {
    "size": "SIZE", "duration": "TIME", "pause_duration": "TIME", "since": "WHEN", "deadline": "WHEN", "deadline_or_none": "WHEN",
    "hours": "HOURS", "whole_number.<locals>.read": "N", "positive_number": "NUMBER", "readable_file": "FILE", "writable_file": "FILE",
    "readable_folder": "DIR", "writable_folder": "DIR", "readable_file_or_folder": "PATH",
}  # fmt: skip
"""Words for the values of options, by the function that reads them (`port_agent.cli.arguments`)."""


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    """argparse's help format. Texts of several lines stay unchanged, and texts of one line are wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind: Any = action.type
        if isinstance(kind, type) and issubclass(kind, pathlib.PurePath):
            return "PATH"
        return _NOUNS.get(getattr(kind, "__qualname__", ""), action.dest.upper().replace("_", "-"))

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper().replace("_", "-")

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        actions = list(actions)
        optional = [action for action in actions if action.option_strings and not action.required]
        if usage is None and len(optional) > MAX_OPTIONS:
            given = [action for action in actions if action not in optional]
            words = super()._format_usage(None, [action for action in given if action.option_strings], (), "").split()
            typed = (
                super()._format_usage(None, [action for action in given if not action.option_strings], (), "").split()
            )
            prog = self._prog.split()
            usage = " ".join((*prog, *typed[len(prog) :], *words[len(prog) :], "[options]"))
        return super()._format_usage(usage, actions, groups, prefix)
