"""Read and print quantities with units: bytes, seconds, joules."""

import re

from planner.ir.errors import PortError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power


class SizeError(PortError, ValueError):
    """A size that cannot be read."""


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that `text` means.

    "300M" and "300MiB" are binary (300 * 2**20), "300MB" is decimal (300 * 10**6), a bare number is bytes.
    """
    if isinstance(text, int):
        if text < 0:
            raise SizeError(f"size {text} is negative; give a number of bytes such as 300000000")
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and _UNITS.get(match[2].upper())
    if not match or unit is None:
        raise SizeError(f"cannot read the size {text!r}; write it like 300M (= 300 MiB), 300MB or 1.5G")
    return int(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """Return `count` bytes as a short text with a binary unit, such as `12.3 MiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration as a person would say it: `850 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`."""
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
