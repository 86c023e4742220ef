"""Temperatures of a Jetson from a `tegrastats` line, where sysfs shows no thermal zone (in containers)."""

import asyncio
import contextlib
import re

from port_agent.facts.platform import COMMAND_TIMEOUT_S

_ZONE = re.compile(r"\b([A-Za-z][A-Za-z0-9_]*)@(-?\d+(?:\.\d+)?)C")
_ABSENT_BELOW_C = -40.0
"""Degrees Celsius below which a zone is absent: a zone that is switched off reads -256."""

_CONSTANT_ZONES = ("pmic",)
"""Zones that are constant: PMIC@50C is printed on every Nano, TX2 and Xavier at any load."""


def zone_temperatures(line: str) -> dict[str, float]:
    """Return degrees Celsius by zone from a line in any format since L4T R28, without constant
    zones and those that are off.
    """
    return {
        name.lower(): float(value)
        for name, value in _ZONE.findall(line)
        if float(value) > _ABSENT_BELOW_C and not name.lower().startswith(_CONSTANT_ZONES)
    }


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
    return max(zone_temperatures(line.decode("utf-8", "replace")).values(), default=None)
