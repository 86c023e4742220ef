"""A device's id: the SHA-256 of its certificate, in the form that people read and type.

The form is that of Syncthing: base 32 in upper case, a check digit after every 13, groups of seven. The check digits
follow Luhn's algorithm over 32 symbols, doubling from the right as intended. They detect every single wrong symbol, and
every exchange of neighbours except the first symbol of the alphabet next to the last.
"""

import base64
import re
from dataclasses import dataclass

from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import shown

DIGEST_BYTES = 32
"""Bytes of a SHA-256 digest."""
SHORT_DIGITS = 12
"""Digits of the announced part of an id: 48 bits in hexadecimal, which do not coincide by chance on one network."""
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_CHECKED, _GROUP = 13, 7
_SYMBOLS = 4 * _CHECKED
"""Number of symbols: 52 contain 260 bits, which are the digest and four zeros."""
_SHORT = re.compile(rf"[0-9a-f]{{{SHORT_DIGITS}}}")
_MISREAD = str.maketrans({"0": "O", "1": "I", "8": "B"})
"""Digits that the alphabet lacks, and the letters as which they are read."""


class DeviceIdError(PortError):
    """A text that is not a valid device id."""

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(
            f"{shown(text)} is not a valid device id: {reason}; copy it from `port-agent peer list` on that device"
        )


@dataclass(frozen=True, slots=True, order=True)
class DeviceId:
    """The SHA-256 of a device's certificate; printed as 56 characters in eight groups."""

    digest: bytes

    def __str__(self) -> str:
        """Return the spelling that is printed."""
        symbols = base64.b32encode(self.digest).decode("ascii").rstrip("=")
        parts = (symbols[at : at + _CHECKED] for at in range(0, _SYMBOLS, _CHECKED))
        checked = "".join(part + check_digit(part) for part in parts)
        return "-".join(checked[at : at + _GROUP] for at in range(0, len(checked), _GROUP))

    @property
    def short(self) -> str:
        """The part that is announced."""
        return self.digest.hex()[:SHORT_DIGITS]

    @property
    def group(self) -> str:
        """The first group, by which people distinguish devices in a list."""
        return str(self)[:_GROUP]


def read_device_id(text: str) -> DeviceId:
    """Return the id that `text` denotes, in any case and grouping, with or without check digits.

    Raises DeviceIdError.
    """
    symbols = re.sub(r"[\s-]", "", text).upper().translate(_MISREAD)
    if strange := set(symbols) - set(_ALPHABET):
        raise DeviceIdError(text, f"it holds {shown(''.join(sorted(strange)))}")
    if len(symbols) == _SYMBOLS + 4:
        parts = [symbols[at : at + _CHECKED + 1] for at in range(0, len(symbols), _CHECKED + 1)]
        for number, part in enumerate(parts, start=1):
            if check_digit(part[:-1]) != part[-1]:
                raise DeviceIdError(text, f"there is a typing error in groups {2 * number - 1} and {2 * number}")
        symbols = "".join(part[:-1] for part in parts)
    if len(symbols) != _SYMBOLS:
        raise DeviceIdError(text, f"it has {len(symbols)} letters and digits, not {_SYMBOLS + 4}")
    digest = base64.b32decode(symbols + "====")
    if base64.b32encode(digest).decode().rstrip("=") != symbols:  # the four bits after the digest are zero
        raise DeviceIdError(text, "its last letter cannot end an id")
    return DeviceId(digest)


def check_digit(symbols: str) -> str:
    """Return the Luhn check digit of symbols of the alphabet, modulo 32."""
    base, total = len(_ALPHABET), 0
    for place, symbol in enumerate(reversed(symbols)):
        value = _ALPHABET.index(symbol) * (2 if place % 2 == 0 else 1)
        total += value // base + value % base
    return _ALPHABET[-total % base]


def is_short_id(text: str) -> bool:
    """Return whether `text` has the form of an announced id."""
    return _SHORT.fullmatch(text) is not None
