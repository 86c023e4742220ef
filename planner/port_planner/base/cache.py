"""Sealed files, and the folders of them in the user's cache: written in one piece, so many in each and no more.

What is kept there saves time alone: a file that is damaged, of another form or from elsewhere is none, and a folder that cannot be
written keeps none.
"""

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

_SEAL_BYTES = 8
"""Of the checksum in front."""

_Content = TypeVar("_Content")


def sealed(content: object) -> bytes:
    """Return a content as bytes, behind their checksum."""
    packed = msgspec.msgpack.encode(content)
    return xxhash.xxh3_64_digest(packed) + packed


def read_sealed(path: Path, kind: type[_Content]) -> _Content | None:
    """Return the content of a file that holds what `sealed` gave; None where there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        seal, packed = (content := path.read_bytes())[:_SEAL_BYTES], content[_SEAL_BYTES:]
        if xxhash.xxh3_64_digest(packed) == seal:
            return msgspec.msgpack.decode(packed, type=kind)
    return None


def cache_folder(what: str) -> Path | None:
    """Return where the user's cache has files of this kind; None where the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache and Path(cache).is_absolute():
        return Path(cache) / "port-agent" / what
    home = os.environ.get("HOME")
    return Path(home) / ".cache" / "port-agent" / what if home else None


def read_cached(folder: Path | None, name: str, kind: type[_Content]) -> _Content | None:
    """Return what a folder keeps under a name; None where there is none that can be read."""
    return None if folder is None else read_sealed(folder / name, kind)


def write_cached(folder: Path | None, name: str, content: object, *, max_files: int) -> None:
    """Keep a content under a name, in place of what was there; of more than `max_files` those not written for longest go."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_bytes(sealed(content))
        draft.replace(folder / name)
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-max_files]:
            old.unlink()
