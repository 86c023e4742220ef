"""The user's text as records: a line of JSON each, or one plain text.

A record has `text`, and a `label` where a model is to choose one; or `prompt` and `completion`; or `messages`, a list of {"role", "content"}.
Other keys are ignored. A file is read a line or a piece at a time, whenever its records are gone through: it may be larger than the memory.
"""

import codecs
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.units import shown

_MAX_SHOWN = 60

_CHUNK_CHARACTERS = 1 << 15
"""Of a text that are made tokens at once: that takes 300 bytes a character for a moment."""

_LINE_END = "\n"

_CHUNK_BYTES = 1 << 20
"""Read at once to find where a file is not a valid text."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """One of four: `text`, a `file` that is a text, `prompt` and `completion`, or `messages`."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] = ()
    label: str | None = None
    """Of the text; used by models that choose one."""
    file: Path | None = None

    @property
    def is_text(self) -> bool:
        return self.text is not None or self.file is not None

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces that end with a line, where lines are shorter than a piece.

        Nothing where the record is none. Raises FinetuneError where a file cannot be read.
        """
        if self.text is not None:
            yield from _pieces(iter((self.text,)))
        elif self.file is not None:
            yield from _pieces(_read(self.file, lambda stream: iter(lambda: stream.read(_CHUNK_CHARACTERS), "")))


class Records(Collection[Record]):
    """The records of a file. `broken`: lines that are no record; `first_broken`: which, and why."""

    def __init__(self, path: Path) -> None:
        """Look at all of them once. Raises FinetuneError where the file cannot be read or has nothing to train on."""
        self._path = path
        self._by_line = path.suffix in (".jsonl", ".json")
        self._count = self.broken = 0
        self.first_broken = ""
        any_words = False
        for record in self._found(self._count_broken):
            self._count += 1
            any_words = any_words or _has_words(record)
        if not any_words:
            why = f"; {self.broken} lines are broken, the first: {self.first_broken}" if self.broken else ""
            raise FinetuneError(f"{path} has nothing to train on{why}")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        return self._found()

    def __contains__(self, record: object) -> bool:
        return any(record == one for one in self)

    def _found(self, broken: Callable[[str], None] = lambda why: None) -> Iterator[Record]:
        """Yield the records, and say of each line that is none which and why. Raises FinetuneError."""
        if not self._by_line:
            yield Record(file=self._path)
            return
        for number, line in enumerate(_read(self._path, iter), 1):
            if not line.strip():
                continue
            try:
                record = _record(json.loads(line))
            except ValueError as error:
                broken(f"line {number}: {error} in {shown(line.removesuffix(_LINE_END)[:_MAX_SHOWN])}")
            else:
                yield record

    def _count_broken(self, why: str) -> None:
        self.broken += 1
        self.first_broken = self.first_broken or why


def _read(path: Path, parts: Callable[[IO[str]], Iterator[str]]) -> Iterator[str]:
    """Yield parts of a text file, as `parts` reads them. Raises FinetuneError where it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as stream:  # with or without the mark that editors on Windows put first
            yield from parts(stream)
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}; give a .jsonl or .txt file") from error
    except UnicodeDecodeError as error:
        raise FinetuneError(f"{path} is no UTF-8 text (byte {_first_other_byte(path)}); convert it") from error


def _first_other_byte(path: Path) -> int:
    """Return where the first byte lies that is of no UTF-8 text, maybe of a character that the file ends within."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            begun = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                return done - begun + error.start
            done += len(chunk)
    return done - len(decoder.getstate()[0])


def _pieces(parts: Iterator[str]) -> Iterator[str]:
    """Yield a text that comes in parts in pieces that end with a line, where lines are shorter than a piece."""
    text = ""
    for part in parts:
        text, start = text + part, 0
        while len(text) - start > _CHUNK_CHARACTERS:
            end = text.rfind(_LINE_END, start, start + _CHUNK_CHARACTERS) + 1 or start + _CHUNK_CHARACTERS
            yield text[start:end]
            start = end
        text = text[start:]
    yield text


def _record(entry: Any) -> Record:
    """Raise ValueError for what is not a valid record."""
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
    written = record.pieces() if record.is_text else (record.completion or "",)
    return any(piece.strip() for piece in written) or bool(record.messages)
