"""The zip archive of a bundle: its members, each checked against the manifest's hashes, and tensor locations in the
file.
"""

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from port_planner.ir.bundle import safetensors_io
from port_planner.ir.bundle.manifest import FORMATS, BundleError
from port_planner.ir.bundle.safetensors_io import Member
from port_planner.ir.graph import MAX_STORAGE_BYTES

MAX_HEADER_BYTES = 64 << 20
"""Largest size in bytes of a compressed member.

The largest one measured is 0.4 MB; a larger one is damaged or hostile.
"""
MAX_MANIFEST_BYTES = 32 << 20
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zlib.error)
"""Exceptions that the standard library raises for an archive that is damaged, encrypted, or of an unknown version."""


def open_archive(path: Path) -> zipfile.ZipFile:
    """Return the archive, which the caller closes. Raises BundleError if the file is not a valid bundle."""
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise BundleError(
            f"{path} does not exist; create it with: port-agent plan train.py --ram 300M -o {path}"
        ) from None
    except _ZIP_ERRORS as error:
        raise BundleError(f"{path} is not a bundle ({error}); create one with port-agent plan") from error


def _member_bytes(archive: zipfile.ZipFile, name: str, limit: int, path: Path) -> bytes:
    try:
        info = archive.getinfo(name)
        if info.file_size > limit:
            raise BundleError(f"{path}: {name} claims {info.file_size} bytes; the limit is {limit}")
        with archive.open(info) as stream:
            data = stream.read(limit + 1)
    except KeyError:
        raise BundleError(f"{path} has no {name}; it is not a bundle, or damaged") from None
    except _ZIP_ERRORS as error:
        raise BundleError(f"{path}: {name} cannot be read ({error}); copy it again or recreate it") from error
    if len(data) > limit:
        raise BundleError(f"{path}: {name} unpacks to more than {limit} bytes")
    return data


def manifest_json(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    """Return the unchecked manifest of a readable format version. Raises BundleError for any other."""
    data = _member_bytes(archive, "manifest.json", MAX_MANIFEST_BYTES, path)
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: the manifest is not valid JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("format") not in FORMATS:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise BundleError(
            f"{path} has format {found}, this version reads {', '.join(map(str, FORMATS))}; plan the job again with "
            "port-agent plan"
        )
    return raw


def hashes_of(raw: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the manifest's hashes: SHA-256 of members by name, XXH3 of tensors by `MEMBER/NAME`. Raises BundleError if
    there are none.
    """
    try:
        return msgspec.convert(raw.get("hashes"), dict[str, str])
    except msgspec.ValidationError as error:
        raise BundleError(f"{path}: the manifest has no hashes ({error}); recreate the bundle") from error


def unpacked_member(archive: zipfile.ZipFile, name: str, expected: Any, path: Path) -> Any:
    """Return the contents of a msgpack member after checking its SHA-256.

    Raises BundleError if the hash differs or it cannot be read.
    """
    data = _member_bytes(archive, name, MAX_HEADER_BYTES, path)
    if hashlib.sha256(data).hexdigest() != expected:
        raise BundleError(f"{path}: {name} is damaged (SHA-256 differs); copy it again or recreate it")
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise BundleError(f"{path}: {name} is not a valid msgpack ({error})") from error


def tensor_index(archive: zipfile.ZipFile, name: str, hashes: Mapping[str, str], path: Path) -> dict[str, Member]:
    """Return each tensor's location in a safetensors member, with all numbers checked.

    Raises BundleError if it is damaged or compressed.
    """
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise BundleError(f"{path} has no {name}; it is not a bundle, or damaged") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_STORAGE_BYTES:
        raise BundleError(f"{path}: {name} is compressed or too large; make the bundle with port-agent plan")
    try:
        with archive.open(info) as stream:
            header = safetensors_io.read_header(stream, info.file_size)
        if hashlib.sha256(header).hexdigest() != hashes.get(name):
            raise BundleError(f"{path}: {name} is damaged (SHA-256 differs); copy it again or recreate it")
        found = safetensors_io.index(header, info.file_size, _payload_offset(archive, info))
    except (*_ZIP_ERRORS, struct.error, KeyError) as error:
        raise BundleError(f"{path}: {name} is damaged ({error}); copy it again or recreate it") from error
    if {f"{name}/{key}" for key in found} != {key for key in hashes if key.startswith(f"{name}/")}:
        raise BundleError(f"{path}: {name} and the manifest's checksums name different tensors; recreate the bundle")
    return found


def _payload_offset(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Return where a stored member's bytes begin: after its local header (30 bytes, name, extra field)."""
    stream = archive.fp
    if stream is None:
        raise ValueError("the archive is closed")
    stream.seek(info.header_offset)
    header = stream.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + int(name_length) + int(extra_length)
