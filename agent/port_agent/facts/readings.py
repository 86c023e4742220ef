"""What the agent knows about the device at one moment, as frozen values; unknown is None or UNKNOWN."""

from dataclasses import dataclass, field
from enum import Enum


class Answer(Enum):
    """Three-valued answer of a sensor."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Power(Enum):
    """Where the device's power comes from."""

    EXTERNAL = "external"
    """A mains, USB or wireless supply is online."""
    BATTERY = "battery"
    """The system battery discharges and no supply is online."""
    ASSUMED = "assumed external"
    """The kernel lists no supply at all: the usual case of a Pi, a Jetson or a desktop."""
    UNKNOWN = "unknown"
    """Supplies are listed, but they cannot be read or contradict each other."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One reading that failed, and why; it becomes a health item."""

    sensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class IdleSignal:
    """One opinion on whether the device is idle right now.

    A weak signal never proves activity: logind's IdleHint stays "no" under several desktops forever.
    """

    name: str
    idle: Answer
    detail: str
    weak: bool = False


@dataclass(frozen=True, slots=True)
class PowerReading:
    """Power source and battery level in percent; `detail` names the supplies that decided."""

    power: Power
    battery_percent: float | None
    detail: str
    battery: Answer = Answer.UNKNOWN
    """Whether there is a battery."""


@dataclass(frozen=True, slots=True)
class ThrottleReading:
    """Throttling: whether firmware limits the clock now; `since_boot` only means that it once happened."""

    now: Answer
    detail: str = ""
    since_boot: Answer = Answer.UNKNOWN


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that one decision depends on, read at one moment."""

    power: Power = Power.UNKNOWN
    power_detail: str = ""
    battery_percent: float | None = None
    battery: Answer = Answer.UNKNOWN
    """Whether there is a battery."""
    idle_signals: tuple[IdleSignal, ...] = ()
    temperature_c: float | None = None
    throttle: ThrottleReading = field(default=ThrottleReading(Answer.UNKNOWN))
    free_disk_bytes: int | None = None
    free_inodes: int | None = None
    """Number of files that can still be created on the state directory's disk; None if it has no limit."""
    available_memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    memory_pressure_percent: float | None = None
    """Percent of the last 10 s in which some task waited for memory (PSI some avg10)."""
    online: Answer = Answer.UNKNOWN
    metered: Answer = Answer.UNKNOWN
    flash_written_today_bytes: int = 0
    pause: str = ""
    """Why the user paused everything; empty if there is no pause."""
    devices: frozenset[str] | None = None
    """Kinds of devices besides the CPU (`port_planner.ir.device_kinds`); None if not checked."""
    faults: tuple[Fault, ...] = ()
