"""This device's key pair and certificate, in one file that is created when it is first needed.

It is not created at installation, because images of memory cards are copied, and a copied key would make two
devices one. A separate process creates the file (`port_agent.peers.identity.make`), so that the agent does not
keep `cryptography` loaded.
"""

import base64
import threading
from dataclasses import dataclass
from pathlib import Path

from port_agent.peers.identity.device_id import DIGEST_BYTES, DeviceId, DeviceIdError, read_device_id
from port_agent.system.checksum import bytes_checksum
from port_agent.system.helper_process import HelperCommand, HelperError, run_helper
from port_planner.base.errors import PortError

FILE_NAME = "identity.pem"
LIMIT_BYTES = 16 << 10
"""Largest key file in bytes; ours has 1 kB."""
_OLD_FILE_NAME = "device-id"
"""Name of a file of random bits from before there were keys."""
_MAKER = "port_agent.peers.identity.make"
_MAKING_PATIENCE_S = 120.0
"""Longest wait for a new key, in seconds. It takes 0.3 s on a PC; a first start from a slow card reads 10 MB of
libraries."""
_MAKING = threading.Lock()
"""Lock, because discovery and pairing may both need the first key at once."""
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class IdentityError(PortError):
    """The key file cannot be read or created."""


@dataclass(frozen=True, slots=True)
class Identity:
    """This device's identity. `certificate`, in DER, is what others pin; the key stays in the file."""

    id: DeviceId
    certificate: bytes
    file: Path


def own_identity(state_dir: Path) -> Identity:
    """Return this device's identity, creating it if there is none. Reads files and may start a process.

    Raises IdentityError if the file is damaged or cannot be created, OSError if it cannot be read.
    """
    path = state_dir / FILE_NAME
    with _MAKING:
        if not path.exists():
            _make(path)
            (state_dir / _OLD_FILE_NAME).unlink(missing_ok=True)
    return read_identity(path)


def read_identity(path: Path) -> Identity:
    """Return the identity in a key file; raises IdentityError for a damaged one, OSError."""
    with path.open("rb") as file:
        content = file.read(LIMIT_BYTES + 1)
    head, _, pem = content.partition(b"\n")
    words = head.decode("ascii", errors="replace").split(" ")
    if len(words) != 3 or words[0] != "#" or words[2] != bytes_checksum(words[1].encode() + b"\n" + pem):
        raise _damaged(path, "its checksum differs")
    try:
        return Identity(read_device_id(words[1]), certificate_in(pem.decode("ascii")), path)
    except (DeviceIdError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def key_file(pem: bytes, digest: bytes) -> bytes:
    """Return the content of a key file: a line with id and checksum, which readers of PEM skip, and then the PEM.

    Raises ValueError if `digest` does not have the length of a digest.
    """
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest of {len(digest)} bytes; SHA-256 has {DIGEST_BYTES}")
    name = str(DeviceId(digest))
    return f"# {name} {bytes_checksum(name.encode() + bytes([10]) + pem)}\n".encode() + pem


def certificate_in(pem: str) -> bytes:
    """Return the DER of the first certificate in a PEM text; raises ValueError if there is none."""
    _, begun, rest = pem.partition(_BEGIN)
    body, ended, _ = rest.partition(_END)
    if not begun or not ended:
        raise ValueError("it holds no certificate")
    return base64.b64decode("".join(body.split()), validate=True)


def certificate_pem(der: bytes) -> str:
    """Return a certificate as PEM."""
    text = base64.b64encode(der).decode("ascii")
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    return "\n".join([_BEGIN, *lines, _END, ""])


def _make(path: Path) -> None:
    try:
        run_helper(HelperCommand(_MAKER, (str(path),)), within_s=_MAKING_PATIENCE_S)
    except HelperError as error:
        raise IdentityError(
            f"{path} cannot be created: {error.last_line or f'its process {error}'}; check the directory and its disk"
        ) from error


def _damaged(path: Path, reason: str) -> IdentityError:
    return IdentityError(
        f"{path} is damaged ({reason}); restore it from a backup, or delete it and pair this device again: others know "
        "it by this file"
    )
