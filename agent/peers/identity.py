"""Who this device is to others: an id that stays the same across restarts.

The id is 128 random bits, not the hash of a key: nothing is signed or encrypted yet, so it proves nothing and anybody
can claim it. It says which lines in a list are the same device, no more.
"""

import os
import re
from pathlib import Path

from agent.system.atomic_file import write_atomically
from agent.system.checksum import bytes_checksum

FILE_NAME = "device-id"
SHORT_DIGITS = 12
"""What others see of the id: 48 bits, of which two devices in one network do not come by the same by chance."""
_WHOLE = re.compile(r"[0-9a-f]{32}")
_SHORT = re.compile(rf"[0-9a-f]{{{SHORT_DIGITS}}}")


def device_id(state_dir: Path) -> str:
    """Return this device's id, 32 hexadecimal digits.

    Makes and keeps one if there is none that can be read.

    Raises OSError when the state directory cannot be read or written.
    """
    path = state_dir / FILE_NAME
    try:
        known, *seal = path.read_bytes().decode("ascii", errors="replace").split() or [""]
    except FileNotFoundError:
        known, seal = "", []
    if _WHOLE.fullmatch(known) and seal in ([], [bytes_checksum(known.encode())]):  # older agents wrote no checksum
        return known
    made = os.urandom(16).hex()
    write_atomically(path, f"{made} {bytes_checksum(made.encode())}\n".encode())
    return made


def short_id(whole: str) -> str:
    """Return the part of an id that is announced."""
    return whole[:SHORT_DIGITS]


def is_short_id(text: str) -> bool:
    """Return whether `text` is spelled like an announced id."""
    return _SHORT.fullmatch(text) is not None
