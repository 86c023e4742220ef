"""Data files, recognised by their content: texts, JSON by lines or in an array, and tables, each
optionally compressed by gzip.

Entries come one at a time: a file may be larger than memory.
"""

import codecs
import csv
import enum
import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.shapes import COLUMNS, record_of
from port_planner.base.units import shown

CHUNK_CHARACTERS = 1 << 15
"""Characters that are read and tokenized at once, which briefly takes 300 bytes each."""

_CHUNK_BYTES = 1 << 20
"""Bytes read at once to find where a file is not valid text."""

_BEGIN_CHARACTERS = 1 << 16
"""Number of characters at the beginning by which a file is recognised."""

_FIRST_LINES = 100
"""Number of first lines of which one must be an object in a file with one object per line."""

_MAX_SHOWN = 60
_PARQUET_ROWS = 64
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_TABLE_SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",\t;"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"

_OTHERS = {
    b"PK\x03\x04": "an archive, or a document of an office program", b"%PDF": "a PDF", b"SQLite": "a database", b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz", b"\x28\xb5\x2f\xfd": "compressed by zstd", b"ARROW1": "an Arrow file", b"\x7fELF": "a program",
}  # fmt: skip
"""First bytes of unsupported files, and what they are."""


class _TwiceError(ValueError):
    """A JSON object contains a key twice."""


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its keys and values.

    Raises _TwiceError, because otherwise the last value of a repeated key would count.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(f"the key {next(name for name in found if names.count(name) > 1)!r} twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_twice)


class SourceKind(enum.Enum):
    """The kind of a file: one text, a JSON object per line, JSON objects in sequence or in an array, or a table."""

    TEXT = enum.auto()
    LINES = enum.auto()
    OBJECTS = enum.auto()
    TABLE = enum.auto()
    PARQUET = enum.auto()


def files_of(path: Path) -> list[Path]:
    """Return the files of a directory and its subdirectories, by name, without hidden ones; or a single file.

    Raises FinetuneError.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise FinetuneError(f"{path} has no files; give a directory of texts, or a file")
    return files


def source_kind(path: Path) -> SourceKind:
    """Return the kind of a file.

    Raises FinetuneError for an unsupported one, with its first bytes and what is supported.
    """
    start = next(_read(path, lambda stream: iter((stream.read(8),))))
    other = next((what for magic, what in _OTHERS.items() if start.startswith(magic)), None)
    if other is not None:
        raise FinetuneError(f"{path} is {other}; convert it to UTF-8 text, JSON lines, CSV or Parquet")
    if start.startswith(_PARQUET):
        return SourceKind.PARQUET
    begin = next(text_parts(path, lambda stream: iter((stream.read(_BEGIN_CHARACTERS),))))
    if "\0" in begin:
        raise FinetuneError(f"{path} is not text: it has bytes of 0; give UTF-8 text, JSON lines, CSV or Parquet")
    suffix = _suffix(path)
    first = begin.lstrip().partition("\n")[0]
    delimiter = _delimiter(first, _delimiters(suffix))
    if suffix in _TABLE_SUFFIXES or _is_header(first, delimiter):
        if not delimiter:
            raise FinetuneError(
                f"{path} begins with {shown(first[:_MAX_SHOWN])}, but a table's first line must name its columns: "
                f"{' or '.join(map(', '.join, COLUMNS))}"
            )
        return SourceKind.TABLE
    if suffix in _JSON_SUFFIXES:
        return SourceKind.LINES if _is_by_line(begin, suffix) else SourceKind.OBJECTS
    if _has_shape(first) or _has_only_objects(begin):
        return SourceKind.LINES
    if _begins_with_objects(begin, shaped=True):
        return SourceKind.OBJECTS
    broken = first.startswith("{") and _any_has_shape(begin)
    return SourceKind.LINES if broken else SourceKind.TEXT


def entries(path: Path, kind: SourceKind) -> Iterator[tuple[str, object]]:
    """Yield each entry of a file with its location; a broken one is a ValueError.

    Raises FinetuneError if the file cannot be read.
    """
    if kind is SourceKind.LINES:
        lines = enumerate(map(_line, text_parts(path, iter)), 1)
        yield from ((f"line {number}", entry) for number, entry in lines if entry != "")
    elif kind is SourceKind.OBJECTS:
        yield from ((f"entry {number}", entry) for number, entry in enumerate(text_parts(path, _objects), 1))
    elif kind is SourceKind.TABLE:
        read = functools.partial(_rows, delimiters=_delimiters(_suffix(path)))
        rows = text_parts(path, read, newline="")  # a cell may hold a line end of its own
        yield from ((f"row {number}", entry) for number, entry in enumerate(rows, 1))
    elif kind is SourceKind.PARQUET:
        yield from ((f"row {number}", entry) for number, entry in enumerate(_parquet_rows(path), 1))


def text_parts(path: Path, parts: Callable[[IO[str]], Iterator[Any]], newline: str | None = None) -> Iterator[Any]:
    """Yield parts of a text file, as `parts` reads them. Raises FinetuneError if it cannot be read.

    Line ends of Windows are read as those of others, or with `newline` "" as they are.
    """

    def decoded(stream: IO[bytes]) -> Iterator[Any]:
        # with or without a byte order mark, which editors on Windows write
        with io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline) as text:
            yield from parts(text)

    try:
        yield from _read(path, decoded)
    except UnicodeDecodeError as error:
        (place,) = _read(path, _first_other_byte)
        raise FinetuneError(f"{path} is not valid UTF-8 (byte {place}); convert it") from error


def _read(path: Path, parts: Callable[[IO[bytes]], Iterator[Any]]) -> Iterator[Any]:
    """Yield parts of a file's content, decompressed. Raises FinetuneError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            packed = stream.read(len(_GZIP)) == _GZIP
        opened: Any = gzip.open if packed else open
        with opened(path, "rb") as content:
            yield from parts(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise FinetuneError(f"{path}: {reason}; give a file of texts or records") from error


def _first_other_byte(stream: IO[bytes]) -> Iterator[int]:
    """Yield the offset of the first byte that is not UTF-8, or of a character that is cut
    off at the end of the file.
    """
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    while chunk := stream.read(_CHUNK_BYTES):
        begun = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk)
        except UnicodeDecodeError as error:
            yield done - begun + error.start
            return
        done += len(chunk)
    yield done - len(decoder.getstate()[0])


# -- how a file is recognised


def _is_by_line(begin: str, suffix: str) -> bool:
    """Return whether a JSON file has one value per line: its first line is whole, or it is broken and a
    later line has a known shape.
    """
    first, end, rest = begin.lstrip().partition("\n")
    if not end and len(begin) == _BEGIN_CHARACTERS:
        return suffix != _JSON_SUFFIXES[0] and not first.startswith("[")
    value = _json_of(first)
    if isinstance(value, list):
        return bool(rest.strip())
    if value is not None or first.startswith("["):
        return value is not None
    return not _begins_with_objects(begin, whole=True) and (_any_has_shape(begin) or not _begins_with_objects(begin))


def _json_of(line: str) -> object:
    """Return the JSON value of a line; None if it has none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _has_only_objects(begin: str) -> bool:
    """Return whether each of the first lines is a JSON object, such as a record of another shape."""
    lines = [line for line in begin.split("\n")[:_FIRST_LINES] if line.strip()]
    whole = lines if len(begin) < _BEGIN_CHARACTERS else lines[:-1]
    return bool(whole) and all(isinstance(_json_of(line), dict) for line in whole)


def _any_has_shape(begin: str) -> bool:
    """Return whether one of the first lines is a record of a known shape."""
    return any(map(_has_shape, begin.split("\n")[:_FIRST_LINES]))


def _has_shape(line: str) -> bool:
    try:
        record_of(_json_of(line))
    except ValueError:
        return False
    return True


def _begins_with_objects(begin: str, *, shaped: bool = False, whole: bool = False) -> bool:
    """Return whether a text begins with a JSON object, in an array or not; `shaped`: one with a known shape; `whole`:
    one that ends within the text.
    """
    rest = begin.lstrip()
    rest = rest[1:].lstrip() if rest.startswith("[") else rest
    if not rest.startswith("{"):
        return not shaped and begin.lstrip().startswith("[")
    try:
        entry, _ = _DECODER.raw_decode(rest)
        if shaped:
            record_of(entry)
    except (ValueError, RecursionError):
        return (
            not shaped and not whole and len(begin) == _BEGIN_CHARACTERS
        )  # it may be longer than the part that was read
    return True


def _suffix(path: Path) -> str:
    """Return the end of a file's name, without that of its compression."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _delimiters(suffix: str) -> str:
    """Return the delimiters that a table may have. A line with one column does not show its own."""
    return "\t" if suffix == _TABLE_SUFFIXES[1] else _DELIMITERS


def _delimiter(line: str, delimiters: str) -> str | None:
    """Return the delimiter between the columns of a line; None if the columns do not form a known shape."""
    for delimiter in delimiters:
        names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
        if any({*columns} <= {*names} for columns in COLUMNS) and all(
            name and len(name) <= _MAX_SHOWN for name in names
        ):
            return delimiter
    return None


def _is_header(line: str, delimiter: str | None) -> bool:
    """Return whether a line with columns of a shape is a table's header, and not the first line of a similar text."""
    names = line.split(delimiter) if delimiter else []
    return len(names) > 1 and all(name.strip('"').isidentifier() for name in names)


# -- how entries are read


def _line(line: str) -> object:
    """Return the entry of a line, or "" for a blank line."""
    text = line.strip()
    if not text:
        return ""
    try:
        return _checked(_DECODER.decode(text))
    except (ValueError, RecursionError) as error:
        return _broken(error, text)


def _broken(error: Exception, text: str) -> ValueError:
    what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ValueError(f"{what} in {shown(text[:_MAX_SHOWN])}")


def _checked(entry: Any) -> Any:
    """Return an entry without lone surrogates. Raises ValueError."""
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a character (a lone surrogate)") from error
    return entry


def _objects(stream: IO[str]) -> Iterator[object]:
    """Yield JSON objects in sequence or in an array.

    The first unreadable one is yielded as a ValueError and ends the sequence.
    """

    def last(error: Exception) -> ValueError:
        return ValueError(f"{_broken(error, text)}; what follows it in the file is not read")

    text, more = "", True
    while True:
        text = text.lstrip(" \t\r\n,") if text.strip(" \t\r\n,[]") else ""
        text = text[1:].lstrip() if text.startswith("[") else text
        if not text and not more:
            return
        try:
            entry, end = _DECODER.raw_decode(text)
        except (RecursionError, _TwiceError) as error:
            yield last(error)
            return
        except ValueError as error:
            part = stream.read(max(len(text), CHUNK_CHARACTERS)) if more else ""
            more = bool(part)
            if not part and text:
                if text.strip("] \n\r\t"):
                    yield last(error)
                return
            text += part
            continue
        text = text[end:]
        try:
            yield _checked(entry)
        except ValueError as error:
            yield error


def _rows(stream: IO[str], delimiters: str) -> Iterator[object]:
    csv.field_size_limit(1 << 30)
    first = stream.readline()
    delimiter = _delimiter(first.strip(), delimiters) or delimiters[0]
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    twice = next((name for name in names if names.count(name) > 1), None)
    rows = csv.reader(stream, delimiter=delimiter, strict=True)
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            yield ValueError(
                f"{error}: a quotation mark begins a cell and does not end it, and all after it belongs to it"
            )
            continue
        if cells is None:
            return
        if not cells:
            continue
        if len(cells) != len(names):
            yield ValueError(f"{len(cells)} cells for {len(names)} columns")
        elif twice is not None:
            yield ValueError(f"the column {twice!r} twice in one table")
        elif [cell.strip() for cell in cells] == names:
            yield ValueError("the column names again, as in concatenated tables")
        else:
            yield dict(zip(names, cells, strict=True))


def _parquet_rows(path: Path) -> Iterator[Mapping[str, object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise FinetuneError(f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_PARQUET_ROWS):
            yield from map(_with_its_keys, batch.to_pylist())
    except (ArrowException, OSError) as error:
        raise FinetuneError(f"{path} cannot be read ({error}); download it again") from error


def _with_its_keys(value: Any) -> Any:
    """Return a value without the keys that are None: rows of Parquet have every key of any row, such as the
    arguments of other calls.
    """
    if isinstance(value, dict):
        return {key: _with_its_keys(one) for key, one in value.items() if one is not None}
    return [_with_its_keys(one) for one in value] if isinstance(value, list) else value
