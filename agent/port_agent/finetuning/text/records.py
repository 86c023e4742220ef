"""The user's text as records, from one or several files of any supported kind (`port_agent.finetuning.text.sources`).

A file is read in parts each time its records are iterated, so it may be larger than memory.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.shapes import SHAPES, Record, record_of
from port_agent.finetuning.text.sources import CHUNK_CHARACTERS, SourceKind, entries, files_of, source_kind, text_parts


def parts_of(record: Record) -> Iterator[str]:
    """Yield a record's text in parts; nothing if it is not a text. Raises FinetuneError if a file cannot be read."""
    if record.text is not None:
        text = record.text
        yield from (text[start : start + CHUNK_CHARACTERS] for start in range(0, len(text), CHUNK_CHARACTERS))
    elif record.file is not None:
        yield from text_parts(record.file, lambda stream: iter(lambda: stream.read(CHUNK_CHARACTERS), ""))


class Records(Collection[Record]):
    """The records of files, and of all files in directories.

    `broken`: entries that are not valid records; `first_broken`: the first of them, and why. `unread`: keys that are
    not used, with the number of their records. `labels`, `conversations`: numbers of records that have one. `left`:
    files in directories that are not read, and why. `from_directories`: files in directories that are read, and
    whether each is one text.
    """

    def __init__(self, *paths: Path) -> None:
        """Read all files once. Raises FinetuneError if a file cannot be read or there is nothing to train on."""
        self.left: list[str] = []
        self.from_directories: list[tuple[str, bool]] = []
        self._files = list(self._kinds(paths))
        self._count = self.broken = self.labels = self.conversations = 0
        self.first_broken = ""
        self.unread: Counter[str] = Counter()
        any_words = False
        for record in self._found(self._count_broken, self.unread.update):
            self._count += 1
            self.labels += record.label is not None
            self.conversations += bool(record.messages)
            any_words = any_words or _has_words(record)
        if not any_words:
            why = (
                f"; {self.broken} entries are broken, the first: {self.first_broken}; give {SHAPES}"
                if self.broken
                else ""
            )
            raise FinetuneError(f"{', '.join(map(str, paths))} has nothing to train on{why}")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        return self._found()

    def __contains__(self, record: object) -> bool:
        return any(record == one for one in self)

    def _kinds(self, paths: Iterable[Path]) -> Iterator[tuple[Path, SourceKind]]:
        """Yield the files that are read, with their kinds. Raises FinetuneError."""
        for path in paths:
            for file in files_of(path):
                try:
                    kind = source_kind(file)
                except FinetuneError as error:
                    if not path.is_dir():
                        raise
                    self.left.append(str(error))
                    continue
                if path.is_dir():
                    self.from_directories.append((str(file.relative_to(path)), kind is SourceKind.TEXT))
                yield file, kind

    def _found(
        self, broken: Callable[[str], None] = lambda why: None, unread: Callable[[list[str]], None] = lambda keys: None
    ) -> Iterator[Record]:
        """Yield the records; count broken entries with the reason, and the unused keys of each record.

        Raises FinetuneError.
        """
        for file, kind in self._files:
            if kind is SourceKind.TEXT:
                yield Record(file=file, place=file.name)
                continue
            for place, entry in entries(file, kind):
                where = place if len(self._files) == 1 else f"{file.name} {place}"
                try:
                    if isinstance(entry, ValueError):
                        raise entry
                    record, keys = record_of(entry, where)
                    if record.is_text and not _has_words(record):
                        raise ValueError("an empty text")
                except ValueError as error:
                    broken(f"{where}: {error}")
                else:
                    unread(keys)
                    yield record

    def _count_broken(self, why: str) -> None:
        self.broken += 1
        self.first_broken = self.first_broken or why


def _has_words(record: Record) -> bool:
    written = parts_of(record) if record.is_text else (record.completion or "",)
    return any(chunk.strip() for chunk in written) or bool(record.messages)
