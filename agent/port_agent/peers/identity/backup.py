"""A device's identity and whom it trusts as one file, so that a replaced card is the same device to the others.

The file holds the private key: whoever has it is this device. Both must not run at once.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from port_agent.peers.identity.keys import FILE_NAME, Identity, IdentityError, read_identity
from port_agent.system.atomic_file import write_atomically
from port_agent.system.checksum import bytes_checksum

_PAIRED_FOLDER = "paired"
_LIMIT_BYTES = 4 << 20
"""A hundred paired devices take 150 kB."""


class _Backup(msgspec.Struct, frozen=True):
    identity: bytes
    paired: dict[str, bytes]
    """By the names of their files."""


def write_backup(state_dir: Path, file: Path) -> tuple[Identity, int]:
    """Write the identity in a state directory, and whom it trusts, for its owner's eyes alone; returns it and how many these are.

    Raises IdentityError for a damaged one, OSError.
    """
    own = read_identity(state_dir / FILE_NAME)
    paired = {path.name: path.read_bytes() for path in sorted((state_dir / _PAIRED_FOLDER).glob("*.json"))}
    content = msgspec.json.encode(_Backup(own.file.read_bytes(), paired))
    write_atomically(file, bytes_checksum(content).encode() + b"\n" + content)
    return own, len(paired)


def restore_backup(file: Path, state_dir: Path) -> tuple[Identity, int]:
    """Make a state directory that of the device in a backup; returns its identity and how many it trusts.

    Raises IdentityError for a damaged backup, and where there is another identity already, OSError.
    """
    with file.open("rb") as stream:
        seal, _, content = stream.read(_LIMIT_BYTES).partition(b"\n")
    if seal != bytes_checksum(content).encode():
        raise IdentityError(f"{file} is no identity that `port-agent identity export` wrote, or is damaged")
    try:
        backup = msgspec.json.decode(content, type=_Backup)
    except msgspec.MsgspecError as error:
        raise IdentityError(f"{file} holds no identity: {error}") from error
    target = state_dir / FILE_NAME
    if target.exists() and target.read_bytes() != backup.identity:
        known = read_identity(target).id
        raise IdentityError(
            f"{target} is another identity ({known.group}); move it away first, if nobody is to know it any more"
        )
    folder = state_dir / _PAIRED_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, record in backup.paired.items():
        if Path(name).name != name or name.startswith("."):
            raise IdentityError(f"{file} names a paired device {name!r}")
        write_atomically(folder / name, record)
    write_atomically(target, backup.identity)
    _give_to_owner(state_dir, (folder, target, *folder.iterdir()))
    return read_identity(target), len(backup.paired)


def _give_to_owner(state_dir: Path, paths: Iterable[Path]) -> None:
    """Have what root wrote belong to the user of the state directory, as which the agent runs."""
    if os.geteuid() == 0:
        owner = state_dir.stat()
        for path in paths:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
