"""An agent's announcement on the network: a DNS-SD TXT record, written and read (RFC 6763, section 6).

Records may come from anybody on the network. Every length has a limit, characters that could affect a terminal are
dropped, and a record that breaks a rule is not an announcement.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from port_agent.peers.identity.device_id import is_short_id
from port_agent.peers.state import PublicState

FORMAT = "1"
"""Number of the format of the keys below. Unknown keys are ignored, so keys can be added."""
NAME_LIMIT, BOARD_LIMIT, VERSION_LIMIT = 40, 60, 20
"""Largest number of characters, so that a text fits on a line of a table."""
TEXT_LIMIT_BYTES = 512
"""Largest size of a record that is read; ours have at most 250 bytes."""
_STRING_LIMIT_BYTES = 255


@dataclass(frozen=True, slots=True)
class Announcement:
    """One agent, as it describes itself. A state that this version does not know is None."""

    id: str
    name: str
    board: str
    version: str
    state: PublicState | None
    protocol: int = 0
    """The newest version of its protocol for paired devices; 0 for an agent without pairing."""
    pairing_port: int = 0
    """Port at which the device shows a code now; 0 while it shows none."""


class AnnouncementError(ValueError):
    """A record is not an announcement."""


def to_text(announcement: Announcement) -> bytes:
    """Return the TXT record's data."""
    values = {
        "f": FORMAT,
        "id": announcement.id,
        "name": clean(announcement.name, NAME_LIMIT),
        "board": clean(announcement.board, BOARD_LIMIT),
        "version": clean(announcement.version, VERSION_LIMIT),
        "state": announcement.state.value if announcement.state else "",
    }
    numbers = {"protocol": announcement.protocol, "pairing": announcement.pairing_port}
    values |= {key: str(number) for key, number in numbers.items() if number}
    strings = [f"{key}={value}".encode()[:_STRING_LIMIT_BYTES] for key, value in values.items()]
    return b"".join(bytes([len(string)]) + string for string in strings)


def from_text(data: bytes) -> Announcement:
    """Return the announcement in a TXT record; raises AnnouncementError."""
    values: dict[bytes, bytes] = {}
    for string in _strings(data):
        key, _, value = string.partition(b"=")
        values.setdefault(key.lower(), value)  # the first of equal keys counts, whatever its case (6.4)
    device = values.get(b"id", b"").decode("ascii", errors="replace")
    if values.get(b"f") != FORMAT.encode():
        raise AnnouncementError(f"format {values.get(b'f')!r}; this version reads {FORMAT}")
    if not is_short_id(device):
        raise AnnouncementError(f"id {device[:20]!r} is not a valid device id")
    return Announcement(
        id=device,
        name=_shown(values, b"name", NAME_LIMIT) or device,
        board=_shown(values, b"board", BOARD_LIMIT),
        version=_shown(values, b"version", VERSION_LIMIT),
        state=next((state for state in PublicState if state.value.encode() == values.get(b"state")), None),
        protocol=_number(values, b"protocol"),
        pairing_port=_number(values, b"pairing"),
    )


def clean(text: str, limit: int) -> str:
    """Return `text` without control, formatting and surrogate characters, at most `limit` characters."""
    return "".join(character for character in text if character.isprintable())[:limit].strip()


def _shown(values: dict[bytes, bytes], key: bytes, limit: int) -> str:
    return clean(values.get(key, b"").decode("utf-8", errors="replace"), limit)


def _number(values: dict[bytes, bytes], key: bytes) -> int:
    """Return a 16-bit number, 0 for anything else."""
    text = values.get(key, b"")
    return int(text) if re.fullmatch(rb"[0-9]{1,5}", text) and int(text) < 1 << 16 else 0


def _strings(data: bytes) -> Iterator[bytes]:
    """Return the strings of a TXT record, each after its length byte."""
    if len(data) > TEXT_LIMIT_BYTES:
        raise AnnouncementError(f"{len(data)} bytes; at most {TEXT_LIMIT_BYTES} are read")
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        if end > len(data):
            raise AnnouncementError(f"a string ends {end - len(data)} bytes beyond the record")
        yield data[at + 1 : end]
        at = end
