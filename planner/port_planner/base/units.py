"""Parse and print quantities with units: bytes, seconds, joules.

All sizes and durations share this grammar.
"""

import re
from decimal import Decimal

from port_planner.base.errors import ExitCode, PortError

_SIZE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _SIZE_UNITS[_letter] = _SIZE_UNITS[f"{_letter}IB"] = 1024**_power
    _SIZE_UNITS[f"{_letter}B"] = 1000**_power

_MIN_UNITS = 64
"""Number of units from which a size is shown without a fraction."""
LARGEST_BYTES = 2**63 - 1
"""Largest number that a file offset and a database column hold."""
LONGEST_S = 3660 * 86400
"""Ten years in seconds: anything longer is a typing error, and calendars end."""

_NUMBER = r"[0-9]{1,30}(?:\.[0-9]{1,30})?"
_DURATION_UNITS_S = {
    unit: Decimal(seconds)
    for unit, seconds in {
        "": "1",
        "ms": "0.001",
        "s": "1",
        "m": "60",
        "min": "60",
        "h": "3600",
        "d": "86400",
        "w": "604800",
        "y": "31557600",
    }.items()
}
_DURATION_PARTS = re.compile(rf"({_NUMBER})\s*(ms|s|min|m|h|d|w|y)\s*")
_ISO_DURATION = re.compile(
    rf"P(?:({_NUMBER})W)?(?:({_NUMBER})D)?(?:T(?=[0-9])(?:({_NUMBER})H)?(?:({_NUMBER})M)?(?:({_NUMBER})S)?)?"
)
_ISO_UNITS_S = (604800, 86400, 3600, 60, 1)
_HOW_SIZES = "write it like 300M (= 300 MiB), 300MB or 1.5G"
_HOW_DURATIONS = "write it like 90s, 30min, 8h, 3d, 1d12h, 2y, 50ms or PT8H"


class UnitError(PortError, ValueError):
    """A quantity with a unit, or a time, cannot be read."""

    exit_code = ExitCode.IMPOSSIBLE


class SizeError(UnitError):
    """A size cannot be read."""


class DurationError(UnitError):
    """A duration cannot be read."""


class DurationRangeError(DurationError):
    """A duration is below 0 or above ten years."""


def shown(text: object) -> str:
    """Return `text` quoted for a message, with visible escapes and at most some 40 characters."""
    quoted = repr(text)
    return quoted if len(quoted) <= 42 else f"{quoted[:36]}...{quoted[-1]}"


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that `text` denotes.

    "300M" and "300MiB" are binary (300 * 2**20), "300MB" is decimal (300 * 10**6), a bare number is bytes.
    Raises SizeError for anything else, and for sizes below 0 or above 2**63 - 1.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise SizeError(
            f"the size {shown(text)} is a {type(text).__name__}; give a string or a whole number: {_HOW_SIZES}"
        )
    if isinstance(text, int):
        count = Decimal(text)
    else:
        match = re.fullmatch(rf"\s*(-?{_NUMBER})\s*([A-Za-z]*)\s*", text)
        unit = match and _SIZE_UNITS.get(match[2].upper())
        if not match or unit is None:
            raise SizeError(f"cannot read the size {shown(text)}; {_HOW_SIZES}")
        count = Decimal(match[1]) * unit
    if count < 0:
        raise SizeError(f"the size {shown(text)} is negative; {_HOW_SIZES}")
    if count > LARGEST_BYTES:
        raise SizeError(f"the size {shown(text)} exceeds the maximum of 8 EiB; {_HOW_SIZES}")
    return int(count)


def parse_duration(text: str | float) -> float:
    """Return the seconds of a duration such as "50ms", "90s", "5min", "8h", "1d12h" or a bare number (seconds).

    Also accepts "3d", "2w", "2y" (of 365.25 days) and "PT8H".

    Raises DurationError for anything else, DurationRangeError below 0 and above ten years.
    """
    seconds = _duration_of_text(text) if isinstance(text, str) else text
    if not 0 <= seconds <= LONGEST_S:
        raise DurationRangeError(f"the duration {shown(text)} is not between 0 and ten years; {_HOW_DURATIONS}")
    return float(seconds)


def _duration_of_text(text: str) -> float:
    stripped = text.strip()
    sign = -1 if stripped.startswith("-") else 1
    body = stripped.removeprefix("-")
    if re.fullmatch(_NUMBER, body):
        return sign * float(body)
    iso = _ISO_DURATION.fullmatch(body)
    if iso and any(iso.groups()):
        parts = [Decimal(part) * unit for part, unit in zip(iso.groups(), _ISO_UNITS_S, strict=True) if part]
        return sign * float(sum(parts))
    found = _DURATION_PARTS.findall(body)
    units = [_DURATION_UNITS_S[unit] for _, unit in found]
    if not found or _DURATION_PARTS.sub("", body) or sorted(set(units), reverse=True) != units:
        raise DurationError(f"{shown(text)} is not a valid duration; {_HOW_DURATIONS}")
    return sign * float(sum(Decimal(part) * unit for (part, _), unit in zip(found, units, strict=True)))


def format_bytes(count: float) -> str:
    """Return `count` bytes as a short text with a binary unit, such as `12.3 MiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def size_at_least(count: int) -> str:
    """Return the smallest size, as options take it, of at least `count` bytes: `203M`; below 64 MiB `4608K`; below 64
    KiB in bytes.
    """
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= _MIN_UNITS * unit:
            return f"{-(-count // unit)}{letter}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Return a duration in readable form: `850 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_joules(joules: float) -> str:
    """Return an energy with a fitting unit: `3.2 mJ`, `14.0 J`, `1.20 kJ`, `0.35 kWh`."""
    size = abs(joules)
    if size < 1:
        return f"{joules * 1000:.2f} mJ"
    if size < 1000:
        return f"{joules:.2f} J"
    if size < 360_000:
        return f"{joules / 1000:.2f} kJ"
    return f"{joules / 3.6e6:.2f} kWh"
