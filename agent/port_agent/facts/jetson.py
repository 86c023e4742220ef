"""What a Jetson adds: temperatures and RAM from a `tegrastats` line.

Where sysfs shows no zone (containers).
"""

import asyncio
import contextlib
import re
from dataclasses import dataclass

from port_agent.facts.platform import COMMAND_TIMEOUT_S

_ZONE = re.compile(r"\b([A-Za-z][A-Za-z0-9_]*)@(-?\d+(?:\.\d+)?)C")
_RAM = re.compile(r"\bRAM (\d+)/(\d+)MB")
_ABSENT_BELOW_C = -40.0
"""A zone that is switched off reads -256."""

_CONSTANT_ZONES = ("pmic",)
"""PMIC@50C is printed on every Nano, TX2 and Xavier whatever the load."""


@dataclass(frozen=True, slots=True)
class Tegrastats:
    """One line of tegrastats: zone temperatures in degrees Celsius, RAM in bytes."""

    zones_c: dict[str, float]
    used_memory_bytes: int | None
    total_memory_bytes: int | None

    @property
    def hottest_c(self) -> float | None:
        """The hottest zone that is on and not a constant."""
        return max(self.zones_c.values(), default=None)


def parse_tegrastats(line: str) -> Tegrastats:
    """Return temperatures and memory of one line, in any of its formats since L4T R28."""
    zones = {
        name.lower(): float(value)
        for name, value in _ZONE.findall(line)
        if float(value) > _ABSENT_BELOW_C and not name.lower().startswith(_CONSTANT_ZONES)
    }
    ram = _RAM.search(line)
    mib = 1 << 20
    return Tegrastats(
        zones_c=zones,
        used_memory_bytes=int(ram[1]) * mib if ram else None,
        total_memory_bytes=int(ram[2]) * mib if ram else None,
    )


async def read_tegrastats(program: str) -> float | None:
    """Return the hottest zone of the first line that `program` prints.

    Raises OSError when it cannot be started or prints nothing in time.
    """
    process = await asyncio.create_subprocess_exec(
        program, "--interval", "200", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        if process.stdout is None:
            raise OSError("tegrastats has no output")
        line = await asyncio.wait_for(process.stdout.readline(), COMMAND_TIMEOUT_S)
    except TimeoutError as error:
        raise OSError(f"tegrastats printed nothing within {COMMAND_TIMEOUT_S:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return parse_tegrastats(line.decode("utf-8", "replace")).hottest_c
