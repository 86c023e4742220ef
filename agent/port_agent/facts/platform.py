"""The interface between the supervisor and the sensors of one kind of machine."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from port_agent.facts.readings import Answer, Facts
from port_agent.facts.sysfs import Tree

NO_INHIBITOR = "systemd-inhibit does not exist here, or sensors.sysfs_root names another machine's sensors"
"""Reason to show when `Platform.awake_command` returns None."""

COMMAND_TIMEOUT_S = 5.0
"""Seconds after which a command counts as hanging; vcgencmd, busctl, pmset and ioreg answer in milliseconds."""

COMMAND_OUTPUT_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SensorOptions:
    """The policy's settings for the sensors."""

    state_dir: Path
    busy_cpu_percent: float = 25.0
    """Percent of the whole machine that others may use while it still counts as idle."""
    busy_cores: float = 1.0
    """Number of whole CPUs that others may use while the machine still counts as idle; a person needs few."""
    busy_pressure_percent: float = 20.0
    """PSI some avg10 of CPU or IO, in percent, above which the machine counts as used."""
    input_quiet_s: float = 60.0
    """Seconds: more recent input (keyboard, terminal) means that somebody is present."""


@dataclass(frozen=True, slots=True)
class OwnUse:
    """The agent's own use of the machine, so that its worker does not look like a user."""

    training: bool = False
    cpu_s: float = 0.0


class Platform(Protocol):
    """Sensors of one kind of machine."""

    refresh_every_s: float
    hint_works: bool
    """Whether the system's own idle hint was ever true, so that its "no" counts; kept over restarts of the agent."""
    tree: Tree
    """Tree with the files that `read` reads; one of them may hang (`facts/sensor_thread`)."""

    def read(self, options: SensorOptions, own: OwnUse, now_s: float) -> Facts:
        """Return the facts of this moment. Reads files only, so it is fast; never raises for a dead sensor."""

    async def refresh(self) -> None:
        """Query the slow sensors (external commands); `read` then uses their last answers."""

    def plug_monitor(self) -> tuple[str, ...]:
        """Return a signature that changes when the power source may have changed; takes microseconds."""

    def awake_command(self, what: str) -> tuple[str, ...] | None:
        """Return a command that runs a program while `what` (`sleep` or `idle`) is inhibited;
        None if this is not possible.
        """


async def run_command(*argv: str) -> str:
    """Return the output of a sensor command.

    Raises OSError if it cannot run, fails, or does not answer within `COMMAND_TIMEOUT_S`.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise OSError(f"{argv[0]} did not answer within {COMMAND_TIMEOUT_S:g} s") from error
    if process.returncode != 0:
        reason = err[:200].decode("utf-8", "replace").strip() or f"exit status {process.returncode}"
        raise OSError(f"{' '.join(argv[:2])}: {reason}")
    return out[:COMMAND_OUTPUT_LIMIT_BYTES].decode("utf-8", "replace")


def answer(value: bool | None) -> Answer:
    """Return a three-valued answer; None is unknown."""
    if value is None:
        return Answer.UNKNOWN
    return Answer.YES if value else Answer.NO
