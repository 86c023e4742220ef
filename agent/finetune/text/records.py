"""The user's text as records: a line of JSON each, or one plain text.

A record has `text`, and a `label` where a model is to choose one; or `prompt` and `completion`; or `messages`, a list of {"role", "content"}. Other keys are ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.finetune.options import FinetuneError
from planner.ir.units import shown

_MOST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """One of three: `text`, `prompt` and `completion`, or `messages`."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] = ()
    label: str | None = None
    """Of the text; used by models that choose one."""


@dataclass(frozen=True, slots=True)
class Records:
    """What a file has. `broken`: lines that are no record; `first_broken`: which, and why."""

    records: tuple[Record, ...]
    broken: int = 0
    first_broken: str = ""


def read_records(path: Path) -> Records:
    """Return the records of a `.jsonl` file, or the text of any other.

    Raises FinetuneError where it cannot be read or has no record.
    """
    try:
        text = path.read_text("utf-8-sig")  # with or without the mark that editors on Windows put first
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}; give a .jsonl or .txt file") from error
    except UnicodeDecodeError as error:
        raise FinetuneError(f"{path} is no UTF-8 text (byte {error.start}); convert it") from error
    found = _records_of_lines(text) if path.suffix in (".jsonl", ".json") else Records((Record(text=text),))
    if not any(map(_has_words, found.records)):
        why = f"; {found.broken} lines are broken, the first: {found.first_broken}" if found.broken else ""
        raise FinetuneError(f"{path} has nothing to train on{why}")
    return found


def _records_of_lines(text: str) -> Records:
    records: list[Record] = []
    broken, first = 0, ""
    for number, line in enumerate(text.split("\n"), 1):  # what else splitlines takes for an end may stand in a string
        if not line.strip():
            continue
        try:
            records.append(_record(json.loads(line)))
        except ValueError as error:
            broken += 1
            first = first or f"line {number}: {error} in {shown(line[:_MOST_SHOWN])}"
    return Records(tuple(records), broken, first)


def _record(entry: Any) -> Record:
    """Raise ValueError for what is no record."""
    if not isinstance(entry, dict):
        raise ValueError("no object")
    if isinstance(entry.get("text"), str):
        label = entry.get("label")
        return Record(text=entry["text"], label=str(label) if isinstance(label, str | int) else None)
    if isinstance(entry.get("prompt"), str) and isinstance(entry.get("completion"), str):
        return Record(prompt=entry["prompt"], completion=entry["completion"])
    turns = entry.get("messages")
    if isinstance(turns, list) and turns:
        if not all(
            isinstance(t, dict) and isinstance(t.get("role"), str) and isinstance(t.get("content"), str) for t in turns
        ):
            raise ValueError("a message without role and content as texts")
        messages = tuple(Message(t["role"], t["content"]) for t in turns)
        if not any(m.role == "assistant" for m in messages):
            raise ValueError("messages without an assistant's")
        return Record(messages=messages)
    raise ValueError("neither text, nor prompt and completion, nor messages")


def _has_words(record: Record) -> bool:
    return bool((record.text or record.completion or "").strip() or record.messages)
