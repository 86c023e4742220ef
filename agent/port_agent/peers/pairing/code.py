"""The code that one device shows and a person types at the other: eight random digits and a check digit."""

import os
import re

from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import shown

RANDOM_DIGITS = 8
_SOURCE_BYTES = 16
"""Random bytes for a code, so that each code is as likely as any other, to 1 in 10^30."""
TRIES = 3
"""Wrong codes until a new one must be shown; guessing succeeds once in 33 million pairings."""
LIFETIME_S = 300.0
"""Seconds for which a code is valid, long enough to walk to the other device."""


class PairingCodeError(PortError):
    """The typed text is not a valid code."""

    exit_code = ExitCode.IMPOSSIBLE


def new_code() -> str:
    """Return a new code in the form in which it is shown, such as "482-193-059"."""
    digits = f"{int.from_bytes(os.urandom(_SOURCE_BYTES)) % 10**RANDOM_DIGITS:0{RANDOM_DIGITS}d}"
    digits += _check_digit(digits)
    return "-".join(digits[at : at + 3] for at in range(0, len(digits), 3))


def read_code(text: str) -> str:
    """Return the digits of a typed code, in any grouping.

    Raises PairingCodeError, so that a typing error does not use up a try.
    """
    digits = re.sub(r"[\s-]", "", text)
    if not re.fullmatch(rf"[0-9]{{{RANDOM_DIGITS + 1}}}", digits):
        raise PairingCodeError(
            f"{shown(text)} is not a valid pairing code of {RANDOM_DIGITS + 1} digits; type what the other device shows"
        )
    if _check_digit(digits[:-1]) != digits[-1]:
        raise PairingCodeError(
            f"{shown(text)} is mistyped: its last digit does not fit; type what the other device shows"
        )
    return digits


def _check_digit(digits: str) -> str:
    """Return the check digit of Luhn's algorithm."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 == 0 else 1)
        total += value // 10 + value % 10
    return str(-total % 10)
