"""A device's identity, its pairings and the privacy budget that its data has spent, as one file for a replaced card.

The file contains the private key, with which anybody can act as this device. Both devices must
not run at the same time.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from port_agent.peers.identity.keys import FILE_NAME, Identity, IdentityError, read_identity
from port_agent.system.atomic_file import write_atomically
from port_agent.system.checksum import bytes_checksum

_PAIRED_FOLDER, _PRIVACY_FOLDER = "paired", "privacy"
_TRUSTED, _UNTRUSTED = ".json", ".refused"
_LIMIT_BYTES = 4 << 20
"""Largest size in bytes; a hundred paired devices take 150 kB."""


class _Backup(msgspec.Struct, frozen=True):
    identity: bytes
    paired: dict[str, bytes]
    """Contents by file name: trusted devices, and those that nobody may introduce."""
    privacy: dict[str, bytes] = {}
    """Contents by file name: the privacy that data has spent, which stays spent on a new card."""


def write_backup(state_dir: Path, file: Path) -> tuple[Identity, int]:
    """Write the identity in a state directory, and the devices that it trusts, into a file that only its owner can
    read; return it and the number of devices.

    Raises IdentityError for a damaged one, OSError.
    """
    own = read_identity(state_dir / FILE_NAME)
    paired = _files(state_dir / _PAIRED_FOLDER, _TRUSTED, _UNTRUSTED)
    privacy = _files(state_dir / _PRIVACY_FOLDER, ".json")
    content = msgspec.json.encode(_Backup(own.file.read_bytes(), paired, privacy))
    write_atomically(file, bytes_checksum(content).encode() + b"\n" + content)
    return own, _count_trusted(paired)


def _files(folder: Path, *suffixes: str) -> dict[str, bytes]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path.read_bytes() for path in found if path.suffix in suffixes and not path.name.startswith(".")}


def _count_trusted(paired: Iterable[str]) -> int:
    return sum(name.endswith(_TRUSTED) for name in paired)


def restore_backup(file: Path, state_dir: Path) -> tuple[Identity, int]:
    """Restore a device's identity from a backup into a state directory; return the identity and the
    number of trusted devices.

    Raises OSError, and IdentityError for a damaged backup, and if there is already another identity.
    """
    with file.open("rb") as stream:
        seal, _, content = stream.read(_LIMIT_BYTES).partition(b"\n")
    if seal != bytes_checksum(content).encode():
        raise IdentityError(f"{file} was not written by `port-agent peer identity export`, or is damaged")
    try:
        backup = msgspec.json.decode(content, type=_Backup)
    except msgspec.MsgspecError as error:
        raise IdentityError(f"{file} holds no identity: {error}") from error
    target = state_dir / FILE_NAME
    if target.exists() and target.read_bytes() != backup.identity:
        known = read_identity(target).id
        raise IdentityError(
            f"{target} is another identity ({known.group}); move it away first if it is no longer needed"
        )
    for name in (*backup.paired, *backup.privacy):
        if Path(name).name != name or name.startswith("."):
            raise IdentityError(f"{file} names a paired device {name!r}")
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = [target]
    for folder, files in ((state_dir / _PAIRED_FOLDER, backup.paired), (state_dir / _PRIVACY_FOLDER, backup.privacy)):
        if not files:
            continue
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, record in files.items():
            if _is_newer(folder / name, is_trust=files is backup.paired):
                write_atomically(folder / name, record)
        written += [folder, *folder.iterdir()]
    write_atomically(target, backup.identity)
    _give_to_owner(state_dir, written)
    return read_identity(target), _count_trusted(backup.paired)


def _is_newer(file: Path, *, is_trust: bool) -> bool:
    """Return whether a file of a backup replaces the existing one: what was spent or
    unpaired here meanwhile stays so.
    """
    if is_trust:
        return file.suffix != _TRUSTED or not file.with_suffix(_UNTRUSTED).exists()
    return not file.exists()


def _give_to_owner(state_dir: Path, paths: Iterable[Path]) -> None:
    """Give files that root wrote to the owner of the state directory, the user as which the agent runs."""
    if os.geteuid() == 0:
        owner = state_dir.stat()
        for path in paths:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
