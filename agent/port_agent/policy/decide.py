"""When to train: the user's policy as values, and the one pure decision.

`decide(facts, policy, now, memory)` depends only on its arguments. `memory` is the hysteresis of the previous decision,
passed back explicitly; effects happen elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, time, timedelta
from enum import IntEnum

from port_agent.facts.readings import Answer, Facts, IdleSignal, Power
from port_planner.base.units import format_bytes, format_seconds

MIB = 1 << 20

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class State(IntEnum):
    """What the agent may do now. The numbers are part of the control protocol: never renumber."""

    TRAIN = 1
    """The device is idle: train within the `not_in_use` limits."""
    TRAIN_GENTLY = 2
    """Somebody uses the device and the policy allows training within the `in_use` limits."""
    PAUSE = 3
    """Do not train; an existing worker keeps its memory for now."""
    LEAVE = 4
    """Do not train; an existing worker releases its memory."""

    @property
    def trains(self) -> bool:
        """Whether training may continue."""
        return self in (State.TRAIN, State.TRAIN_GENTLY)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A daily time span in local time on one weekday (0 = Monday); if `end` <= `start`, it extends past midnight."""

    weekday: int
    start: time
    end: time

    def bounds(self, day: datetime) -> tuple[datetime, datetime]:
        """Return the start and end of this window if it begins on the date of `day`."""
        start = datetime.combine(day.date(), self.start)
        end = datetime.combine(day.date(), self.end)
        return start, end if end > start else end + timedelta(days=1)

    def covers(self, moment: datetime) -> bool:
        """Return whether local time `moment` is in the window, including the part after midnight."""
        for begin in (moment, moment - timedelta(days=1)):
            start, end = self.bounds(begin)
            if begin.weekday() == self.weekday and start <= moment < end:
                return True
        return False


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """How much of the machine a worker may use, in percent of all CPUs and of all memory."""

    cpu_percent: float = 100.0
    memory_percent: float = 70.0
    memory_bytes: int | None = None

    def memory_limit(self, total_bytes: int | None) -> int | None:
        """Return the smaller of both memory limits in bytes; None when neither is known."""
        share = None if total_bytes is None else int(total_bytes * self.memory_percent / 100)
        return min((limit for limit in (share, self.memory_bytes) if limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's settings. The defaults are sensible for a Pi, a Jetson or a laptop."""

    require_external_power: bool = True
    assume_power: Power | None = None
    """Overrides the sensors: some battery cases feed the host and call themselves a peripheral."""
    min_battery_percent: float = 30.0
    idle_for_s: float = 300.0
    train_while_in_use: bool = False
    busy_cpu_percent: float = 25.0
    busy_cores: float = 1.0
    busy_pressure_percent: float = 20.0
    max_temperature_c: float = 75.0
    resume_temperature_c: float = 65.0
    stop_when_throttled: bool = True
    min_free_disk_bytes: int = 512 * MIB
    min_free_memory_bytes: int = 64 * MIB
    windows: tuple[TimeWindow, ...] = ()
    """Time windows; empty means any time."""
    not_in_use: ResourceLimits = field(default_factory=ResourceLimits)
    in_use: ResourceLimits = field(default_factory=lambda: ResourceLimits(cpu_percent=25.0, memory_percent=30.0))
    flash_write_budget_bytes_per_day: int = 16384 * MIB
    """Bytes that may be written to flash per day; a 32 GB card with 1000 write cycles lasts five years at this rate."""
    keep_in_memory_for_s: float = 0.0
    """Seconds that a paused worker keeps its memory before it must leave."""
    min_pause_s: float = 60.0
    """Least seconds between a stop and the next start, so that training does not start and stop continually."""
    memory_pressure_percent: float = 20.0
    """PSI in percent above which a running job switches to a smaller plan."""
    keep_awake: bool = True
    """Whether sleep is prevented while a job may run on external power."""


@dataclass(frozen=True, slots=True)
class Now:
    """The two clocks: `monotonic_s` for spans, `local` (naive local time) for windows."""

    monotonic_s: float
    local: datetime
    clock_is_set: bool = True
    """Whether `local` may be right: a clock that was never set shows a date before this program's release."""


@dataclass(frozen=True, slots=True)
class Memory:
    """State passed from one decision to the next: the times since which conditions hold, and
    which are held by hysteresis.
    """

    training: bool = False
    stopped_at_s: float | None = None
    idle_since_s: float | None = None
    idle_known_at_s: float | None = None
    """Time of the last signal that the device is idle, in monotonic seconds."""
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """What to do and why, with the numbers. `codes` names the conditions in the order of `reasons`."""

    state: State
    reasons: tuple[str, ...]
    codes: tuple[str, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class _Objection:
    code: str
    reason: str
    at_once: bool = False
    """Whether the memory must be released at once instead of after `keep_in_memory_for_s`."""


BATTERY_MARGIN_PERCENT = 5.0
MIN_FREE_INODES = 64
"""Least number of free inodes.

A run creates about a dozen files, and a disk without inodes rejects new ones regardless of free bytes.
"""
SPACE_MARGIN = 1.25
"""Multiple of the minimum to which free disk or memory must rise, after it fell below the minimum, before training
resumes."""


HEAT_IGNORED_C = 120.0
"""Temperature limit in degrees Celsius that no processor reaches, with which no thermometer is needed."""
PRESENCE_SENSORS = ("cpu load", "pressure", "terminals", "input", "sessions", "logind", "gpu")

SILENCE_S = 60.0
"""Longest silence of all signals, in seconds, after which it is unknown whether the device is idle."""


def decide(facts: Facts, policy: Policy, now: Now, memory: Memory = Memory()) -> PolicyDecision:
    """Return whether to train, with every reason; defined for all inputs."""
    use = device_in_use(facts.idle_signals)
    memory = _with_idle(use, memory, now)
    objections = list(_objections(facts, policy, now, memory, use))
    held = frozenset(objection.code for objection in objections)
    if not objections and not memory.training:
        objections += _settling(policy, now, memory)
    if objections:
        return _stop(objections, policy, now, memory, held)
    after = replace(memory, training=True, held=held)
    left_alone = memory.idle_since_s is not None and now.monotonic_s - memory.idle_since_s >= policy.idle_for_s
    if left_alone or not policy.train_while_in_use:
        return PolicyDecision(State.TRAIN, (_go_reason(facts, policy),), ("go",), after)
    return PolicyDecision(State.TRAIN_GENTLY, ("the device is in use: training gently",), ("gently",), after)


def device_in_use(idle_signals: tuple[IdleSignal, ...]) -> Answer:
    """Return YES if a strong signal says so, NO if some signal reports idleness, otherwise UNKNOWN."""
    if any(signal.idle is Answer.NO and not signal.weak for signal in idle_signals):
        return Answer.YES
    if any(signal.idle is Answer.YES for signal in idle_signals):
        return Answer.NO
    return Answer.UNKNOWN


def in_window(policy: Policy, local: datetime) -> bool:
    """Return whether local time `local` is in an allowed window."""
    return not policy.windows or any(window.covers(local) for window in policy.windows)


def window_closes_in_s(policy: Policy, local: datetime) -> float | None:
    """Return the seconds until the windows no longer allow training; None if no such moment is near.

    Adjacent windows count as one; looks at most a week ahead.
    """
    if not policy.windows or not in_window(policy, local):
        return None
    end = local
    while end - local < timedelta(days=7):
        ends = [
            window.bounds(begin)[1]
            for window in policy.windows
            for begin in (end, end - timedelta(days=1))
            if begin.weekday() == window.weekday and window.bounds(begin)[0] <= end < window.bounds(begin)[1]
        ]
        if not ends:
            return (end - local).total_seconds()
        end = max(ends)
    return None


def next_window(policy: Policy, local: datetime) -> datetime | None:
    """Return when the next window opens, or None when one is open or all times are allowed."""
    if in_window(policy, local):
        return None
    starts = (
        window.bounds(local + timedelta(days=ahead))[0]
        for ahead in range(8)
        for window in policy.windows
        if (local + timedelta(days=ahead)).weekday() == window.weekday
    )
    return min((start for start in starts if start > local), default=None)


def _objections(facts: Facts, policy: Policy, now: Now, memory: Memory, use: Answer) -> Iterator[_Objection]:
    if facts.pause:
        yield _Objection("user", f"{facts.pause}; `port-agent job resume` continues", at_once=True)
    yield from _unreadable(facts, policy)
    yield from _power(facts, policy, memory)
    yield from _presence(facts, policy, now, memory, use)
    yield from _heat(facts, policy, memory)
    yield from _space(facts, policy, memory)
    if policy.windows and not now.clock_is_set:
        shown = f"{now.local:%Y-%m-%d %H:%M}"
        yield _Objection(
            "clock", f"the clock is not set (it shows {shown}), so it is unknown whether a time window is open"
        )
    elif not in_window(policy, now.local):
        opens = next_window(policy, now.local)
        when = f"; the next window opens {opens:%a %H:%M}" if opens else ""
        yield _Objection("window", f"outside the time windows{when}")
    if facts.flash_written_today_bytes >= policy.flash_write_budget_bytes_per_day:
        budget = format_bytes(policy.flash_write_budget_bytes_per_day)
        yield _Objection("flash", f"today's flash write budget of {budget} is used up; it renews at midnight")


def _unreadable(facts: Facts, policy: Policy) -> Iterator[_Objection]:
    """Object to each faulty sensor that the policy needs, because its value is unknown, not good."""
    presence = "when.idle_for = 0" if policy.idle_for_s > 0 and not policy.train_while_in_use else None
    overrides = {
        "disk": "storage.min_free = 0" if facts.free_disk_bytes is None and policy.min_free_disk_bytes else None,
        "memory": "memory.min_available = 0"
        if facts.available_memory_bytes is None and policy.min_free_memory_bytes
        else None,
        "temperature": f"when.max_temperature = {HEAT_IGNORED_C:.0f}"
        if policy.max_temperature_c < HEAT_IGNORED_C
        else None,
        "throttling": "when.stop_when_throttled = false"
        if policy.stop_when_throttled and facts.throttle.now is Answer.UNKNOWN
        else None,
    }
    overrides |= dict.fromkeys(PRESENCE_SENSORS, presence)
    for fault in facts.faults:
        sensor = fault.sensor
        if sensor.startswith("temperature/") and facts.temperature_c is None:
            sensor = "temperature"
        if sensor.partition("/")[0] in PRESENCE_SENSORS:
            sensor = sensor.partition("/")[0]
        if override := overrides.pop(sensor, None):  # one objection is enough
            reason = f"{fault.sensor} cannot be read ({fault.reason}); {override} trains without it"
            yield _Objection("unreadable", reason)


def _power(facts: Facts, policy: Policy, memory: Memory) -> Iterator[_Objection]:
    power = policy.assume_power or facts.power
    level = facts.battery_percent
    shown = "" if level is None else f" {level:.0f} %"
    if policy.require_external_power and power is Power.BATTERY:
        yield _Objection("battery", f"on battery{shown}", at_once=True)
    elif policy.require_external_power and power is Power.UNKNOWN:
        detail = facts.power_detail or "no reading"
        yield _Objection("power", f"cannot tell the power source ({detail}); set when.assume_power", at_once=True)
    elif power is Power.BATTERY and level is None and policy.min_battery_percent > 0:
        yield _Objection(
            "low-battery", "on a battery whose level cannot be read; when.min_battery = 0 trains without it"
        )
        return
    if level is None:
        if "low-battery" in memory.held and facts.battery is not Answer.NO:
            yield _Objection("low-battery", "the battery was low and its level can no longer be read")
        return
    margin = BATTERY_MARGIN_PERCENT if "low-battery" in memory.held else 0.0
    needed = min(100.0, policy.min_battery_percent + margin)
    if level < needed:
        yield _Objection("low-battery", f"battery {level:.0f} %, training needs {needed:.0f} %")


def _presence(facts: Facts, policy: Policy, now: Now, memory: Memory, use: Answer) -> Iterator[_Objection]:
    if policy.train_while_in_use or policy.idle_for_s <= 0:
        return
    if use is Answer.YES:
        seen = "; ".join(signal.detail for signal in facts.idle_signals if signal.idle is Answer.NO and not signal.weak)
        yield _Objection("in-use", f"the device is in use: {seen}", at_once=True)
    elif memory.idle_since_s is None:
        yield _Objection("presence", "cannot tell whether the device is in use; set when.idle_for = 0 to train anyway")
    elif now.monotonic_s - memory.idle_since_s < policy.idle_for_s:
        idle_s = max(0.0, now.monotonic_s - memory.idle_since_s)
        wanted = format_seconds(policy.idle_for_s)
        yield _Objection("idle", f"idle for {format_seconds(round(idle_s))} of {wanted}")


def _heat(facts: Facts, policy: Policy, memory: Memory) -> Iterator[_Objection]:
    limit = policy.resume_temperature_c if "hot" in memory.held else policy.max_temperature_c
    if facts.temperature_c is None:
        if "hot" in memory.held:
            yield _Objection("hot", "it was too hot and the temperature can no longer be read")
    elif facts.temperature_c > limit:
        goal = f"resumes at {policy.resume_temperature_c:.0f} °C"
        yield _Objection(
            "hot", f"{facts.temperature_c:.0f} °C is too hot (limit {policy.max_temperature_c:.0f}); {goal}"
        )
    if policy.stop_when_throttled and facts.throttle.now is Answer.YES:
        yield _Objection("throttled", f"the processor is throttled ({facts.throttle.detail or 'firmware limit'})")


def _space(facts: Facts, policy: Policy, memory: Memory) -> Iterator[_Objection]:
    checks = (
        ("disk", facts.free_disk_bytes, policy.min_free_disk_bytes, "disk space free"),
        ("memory", facts.available_memory_bytes, policy.min_free_memory_bytes, "memory available"),
    )
    for code, value, minimum, what in checks:
        needed = int(minimum * SPACE_MARGIN) if code in memory.held else minimum
        if value is not None and value < needed:
            reason = f"{format_bytes(value)} of {what}, training needs {format_bytes(needed)}"
            yield _Objection(code, reason, at_once=code == "memory")
    if facts.free_inodes is not None and facts.free_inodes < MIN_FREE_INODES and policy.min_free_disk_bytes > 0:
        yield _Objection(
            "inodes",
            f"only {facts.free_inodes} more files (inodes) fit on the disk, training needs {MIN_FREE_INODES}; delete "
            "small files, however many bytes are free",
        )


def _settling(policy: Policy, now: Now, memory: Memory) -> list[_Objection]:
    """Return the objection of the minimum pause after a stop, if it is not over."""
    if memory.stopped_at_s is None or memory.held == {"user"}:  # the user's own pause needs no damping
        return []
    left_s = policy.min_pause_s - (now.monotonic_s - memory.stopped_at_s)
    if left_s <= 0:
        return []
    return [_Objection("settling", f"conditions are good again; starting in {format_seconds(max(1, round(left_s)))}")]


def _stop(
    objections: list[_Objection], policy: Policy, now: Now, memory: Memory, held: frozenset[str]
) -> PolicyDecision:
    stopped_at = now.monotonic_s if memory.training else memory.stopped_at_s
    overdue = stopped_at is None or now.monotonic_s - stopped_at >= policy.keep_in_memory_for_s
    leave = overdue or any(objection.at_once for objection in objections)
    return PolicyDecision(
        State.LEAVE if leave else State.PAUSE,
        tuple(objection.reason for objection in objections),
        tuple(objection.code for objection in objections),
        replace(memory, training=False, stopped_at_s=stopped_at, held=held),
    )


def _with_idle(use: Answer, memory: Memory, now: Now) -> Memory:
    """Return `memory` with an updated idle time.

    Signals may be missing for `SILENCE_S` without interrupting it.
    """
    if use is Answer.YES:
        return replace(memory, idle_since_s=None, idle_known_at_s=None)
    if use is Answer.NO:
        since = now.monotonic_s if memory.idle_since_s is None else memory.idle_since_s
        return replace(memory, idle_since_s=since, idle_known_at_s=now.monotonic_s)
    known_at = memory.idle_known_at_s
    if known_at is not None and now.monotonic_s - known_at > SILENCE_S:
        return replace(memory, idle_since_s=None, idle_known_at_s=None)
    return memory


def _go_reason(facts: Facts, policy: Policy) -> str:
    power = policy.assume_power or facts.power
    level = "" if facts.battery_percent is None else f", battery {facts.battery_percent:.0f} %"
    heat = "" if facts.temperature_c is None else f", {facts.temperature_c:.0f} °C"
    presence = "idle" if policy.idle_for_s > 0 and not policy.train_while_in_use else "no idle condition set"
    return f"{power.value} power{level}, {presence}{heat}"
