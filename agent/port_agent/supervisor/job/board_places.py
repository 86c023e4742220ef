"""Where a job is trained (on this computer, or on which board), and whether a missing board may be back."""

import itertools
from pathlib import Path

import msgspec

from port_agent.jobs.job import Job, JobKind

THIS_COMPUTER = ""
_ANY_BOARD = "any board"
_DEV = Path("/dev")
_SERIAL_DEVICES = ("ttyACM*", "ttyUSB*", "cu.usb*")
"""Names of USB serial ports on Linux and on macOS."""
_JOB_FILE = "job.json"
_MAX_BYTES = 1 << 16
"""Largest size in bytes of a job.json that is read."""


class _BoardNames(msgspec.Struct, frozen=True):
    """The part of a job that names its board."""

    port: str | None = None
    serial: str | None = None
    simulate: bool = False


def place_of(job: Job, bundle: Path | None) -> str:
    """Return what trains a job: `THIS_COMPUTER`, or the board that its options or its job.json name.

    Jobs with the same place run one after the other. A simulated board belongs to its job. All jobs that name no board
    share one place: each uses the only board that is present.
    """
    if job.spec.kind is not JobKind.MCU:
        return THIS_COMPUTER
    given, file = _options(job.spec.arguments), _job_file(bundle)
    if given.simulate or file.simulate:
        return f"simulated board of job {job.id}"
    serial, port = given.serial or file.serial, given.port or file.port
    if serial is not None:
        return f"serial number {serial}"
    return _ANY_BOARD if port is None else str(Path(port).absolute())


def plugged_in(place: str, dev: Path = _DEV) -> frozenset[str]:
    """Return the serial devices that exist. If the set changes, a missing board may be back."""
    found = {str(path) for pattern in _SERIAL_DEVICES for path in dev.glob(pattern)}
    return frozenset(found | ({place} if place.startswith("/") and Path(place).exists() else set()))


def _options(words: tuple[str, ...]) -> _BoardNames:
    """Return the board options among a job's arguments, which were checked at submission."""
    after = dict(itertools.pairwise(words))
    return _BoardNames(after.get("--port"), after.get("--serial"), "--simulate" in words)


def _job_file(bundle: Path | None) -> _BoardNames:
    """Return the contents of a job.json; empty if it cannot be read, which the worker then reports."""
    if bundle is None:
        return _BoardNames()
    try:
        with (bundle / _JOB_FILE if bundle.is_dir() else bundle).open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=_BoardNames)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return _BoardNames()
