"""Sealed files in folders of the user's cache: written atomically, with a maximum number per folder.

The cache only saves time: a damaged or foreign file counts as missing, and a folder that cannot be written stays empty.
"""

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

_SEAL_BYTES = 8
"""Bytes of the checksum at the start."""

_Content = TypeVar("_Content")


def sealed(content: object) -> bytes:
    """Return a content as bytes, preceded by their checksum."""
    packed = msgspec.msgpack.encode(content)
    return xxhash.xxh3_64_digest(packed) + packed


def read_sealed(path: Path, kind: type[_Content]) -> _Content | None:
    """Return the content of a file written with `sealed`, or None if it cannot be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        seal, packed = (content := path.read_bytes())[:_SEAL_BYTES], content[_SEAL_BYTES:]
        if xxhash.xxh3_64_digest(packed) == seal:
            return msgspec.msgpack.decode(packed, type=kind)
    return None


def cache_folder(what: str) -> Path | None:
    """Return the user's cache folder for this kind of file, or None if the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache and Path(cache).is_absolute():
        return Path(cache) / "port-agent" / what
    home = os.environ.get("HOME")
    return Path(home) / ".cache" / "port-agent" / what if home else None


def read_cached(folder: Path | None, name: str, kind: type[_Content]) -> _Content | None:
    """Return the content stored under a name in a folder, or None if it cannot be read."""
    return None if folder is None else read_sealed(folder / name, kind)


def write_cached(folder: Path | None, name: str, content: object, *, max_files: int) -> None:
    """Store content under a name, replacing the old one; beyond `max_files`, the oldest files are deleted."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_bytes(sealed(content))
        draft.replace(folder / name)
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-max_files]:
            old.unlink()
