"""Declared health conditions: code, severity, since when, and the remedy.

A condition is shown only after it has lasted `visible_after_s`, so that a sensor that misses one reading raises no
alarm; it disappears as soon as it is cleared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How serious a condition is; the numbers are part of the control protocol."""

    INFO = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class Condition:
    """A declared kind of problem. `text` and `remedy` are format strings over the reported values."""

    code: str
    severity: Severity
    title: str
    text: str
    remedy: str
    visible_after_s: float = 0.0
    hidden_by: tuple[str, ...] = ()
    """Codes of conditions that explain this one; while one of them is shown, this one is hidden."""


@dataclass(frozen=True, slots=True)
class HealthItem:
    """One thing that is wrong now. `since_s` is on the monotonic clock, `since_wall` in Unix time."""

    code: str
    key: str
    severity: Severity
    title: str
    text: str
    remedy: str
    since_s: float
    since_wall: float

    def as_json(self) -> dict[str, object]:
        """Return plain values for the control protocol."""
        return {
            "code": self.code,
            "key": self.key,
            "severity": self.severity.name.lower(),
            "title": self.title,
            "text": self.text,
            "remedy": self.remedy,
            "since": self.since_wall,
        }


CONDITIONS = {
    condition.code: condition
    for condition in (
        Condition(
            "sensor",
            Severity.WARNING,
            "a sensor cannot be read",
            "{sensor}: {reason}",
            "run `port-agent doctor`; if the sensor does not exist on this device, set its override in config.toml",
            visible_after_s=15.0,
        ),
        Condition(
            "no-temperature",
            Severity.INFO,
            "no temperature sensor",
            "this device shows no processor temperature, so training cannot stop for heat",
            "none needed in a virtual machine; elsewhere load the sensor's kernel module (a Pi: bcm2835_thermal, "
            "a PC: coretemp or k10temp)",
            visible_after_s=60.0,
        ),
        Condition(
            "config",
            Severity.ERROR,
            "the configuration was rejected",
            "{reason}; the previous settings stay in force",
            "correct the named line and run `port-agent reload`",
        ),
        Condition(
            "state-unwritable",
            Severity.ERROR,
            "the state directory cannot be written",
            "{reason}",
            "free space or make {path} writable; no job trains until then",
        ),
        Condition(
            "database",
            Severity.WARNING,
            "the job database was damaged",
            "it was moved to {aside} and rebuilt from its readable parts and the jobs' manifests; history may be lost, "
            "and everything is paused in case you had paused it",
            "`port-agent job resume` continues; check the storage (SD cards wear out); delete the moved file when you "
            "no longer need it",
        ),
        Condition(
            "job-set-aside",
            Severity.ERROR,
            "a stored job cannot be restored",
            "job {job}: {reason}; its files are untouched in {directory}",
            "the agent version that stored it may be able to restore it; `port-agent job cancel {id}` removes it with "
            "its files",
        ),
        Condition(
            "state-damaged",
            Severity.WARNING,
            "the state of a job was damaged",
            "job {job}: {reason}; it continues from step {step}, {lost}",
            "copy your data off the medium and replace it (SD cards wear out); the job's numbers stay exact",
        ),
        Condition(
            "clock-jumped",
            Severity.INFO,
            "the clock jumped",
            "by {jump}; time windows and deadlines were computed again",
            "none needed if it was set by NTP or by hand; a clock that keeps jumping needs a battery",
        ),
        Condition(
            "clock-unset",
            Severity.WARNING,
            "the clock is not set",
            "it shows {shown}; time windows and deadlines are meaningless until it is right",
            "connect the network for NTP, or set it: timedatectl set-time",
            visible_after_s=30.0,
        ),
        Condition(
            "no-memory-limit",
            Severity.WARNING,
            "memory limits cannot be enforced by the kernel",
            "{reason}; RLIMIT_DATA and a lower priority are used instead",
            "run under systemd with Delegate=yes on cgroup v2; on a Pi add cgroup_enable=memory to /boot/firmware/"
            "cmdline.txt, on old systems systemd.unified_cgroup_hierarchy=1",
        ),
        Condition(
            "no-allocator",
            Severity.WARNING,
            "the worker runs without its allocator",
            "{reason}; glibc's is used instead, with the same peak memory and slower steps",
            "install PORT agent again on this machine, with a C compiler (Debian: apt-get install gcc libc6-dev)",
        ),
        Condition(
            "restart-needed",
            Severity.INFO,
            "a setting waits for a restart",
            "{settings} changed in the configuration; the agent still uses the earlier values",
            "systemctl restart port-agent (or stop and run it again); no committed step is lost",
        ),
        Condition(
            "job-given-up",
            Severity.ERROR,
            "a job was given up",
            "job {job}: {reason}",
            "see `port-agent job logs {id}`; after fixing the cause, `port-agent job resume {id}` tries again",
        ),
        Condition(
            "job-failing",
            Severity.WARNING,
            "a job keeps failing",
            "job {job} failed {failures} times in a row: {reason}",
            "see `port-agent job logs {id}`",
        ),
        Condition(
            "device-absent",
            Severity.WARNING,
            "a job waits for its device",
            "job {job} was planned for {kind}, and this machine shows no such device",
            "load its driver (`nvidia-smi` must list the card; in a container pass it through), or plan the job again "
            "with --device cpu; `port-agent job cancel {id}` gives it up",
            visible_after_s=15.0,
        ),
        Condition(
            "job-does-not-fit",
            Severity.WARNING,
            "a job does not fit into the allowed memory",
            "job {job}: its smallest plan needs {needed}, allowed is {allowed}",
            "raise limits.not_in_use.memory, or plan again with a smaller --ram",
        ),
        Condition(
            "out-of-memory",
            Severity.WARNING,
            "a worker ran out of memory",
            "job {job} was stopped at {limit}; {action}",
            "plan again with more headroom if this repeats",
        ),
        Condition(
            "deadline-missed",
            Severity.WARNING,
            "a deadline cannot be kept",
            "job {job}: about {needed} of training left, {left} until the deadline",
            "allow more time windows, a faster plan (more --ram), or move the deadline",
            visible_after_s=60.0,
            hidden_by=("clock-unset",),
        ),
        Condition(
            "worker-stuck",
            Severity.WARNING,
            "a worker is stuck",
            "job {job} has not reported or computed anything for {silent}; if this continues it is killed and restarted",
            "none needed: no committed step is lost; if it repeats, check for a failing disk or an attached debugger",
        ),
        Condition(
            "worker-unresponsive",
            Severity.WARNING,
            "a worker did not respond in time",
            "job {job} did not answer {command} within {limit}; it was {action}",
            "none needed: no committed step is lost; report it if it repeats",
        ),
        Condition(
            "long-operator",
            Severity.INFO,
            "an attached program stopped late",
            "job {job}: {operator} ran on for {waited} after the program was told to pause",
            "an operator cannot be interrupted; smaller batches have shorter operators",
        ),
        Condition(
            "packing-overflow",
            Severity.INFO,
            "tensors are denser than planned",
            "job {job}: in step {step} {count} tensors needed more memory when packed than the plan reserves and "
            "were written to flash",
            "nothing is lost, but flash is written; after three such steps the job continues with a plan that "
            "reserves more; plan it again if this continues",
        ),
        Condition(
            "device-over-plan",
            Severity.WARNING,
            "a job takes more of a device's memory than its plan",
            "job {job}: by step {step} its tensors had taken {excess} more of the device's memory than the plan leaves "
            "them",
            "nothing stopped it, so keep memory free on this machine and plan the job again; report the torch "
            "version and the device",
        ),
        Condition(
            "slow-release",
            Severity.INFO,
            "an attached program releases its memory slowly",
            "job {job}: its memory was not released {limit} after it was told to",
            "its tensors are written to its page file: use a faster --page-dir or a smaller --ram; its user may also "
            "have stopped it",
        ),
        Condition(
            "flash-budget",
            Severity.INFO,
            "today's flash write budget is used up",
            "{written} were written today, {budget} are allowed",
            "raise storage.flash_writes_per_day, or plan with less paging",
        ),
        Condition(
            "inbox",
            Severity.WARNING,
            "an inbox cannot be read",
            "{reason}",
            "make the directory readable for the agent",
            visible_after_s=15.0,
        ),
        Condition(
            "inbox-forgotten",
            Severity.WARNING,
            "data of earlier rounds is trained on again",
            "job {job}: {reason}",
            "cancel the job if that is not acceptable; the storage is wearing out or lost power (as SD cards do)",
        ),
        Condition(
            "no-meter",
            Severity.WARNING,
            "energy is not metered",
            "{reason}",
            "correct [energy] in config.toml, or make the state directory writable, and restart the agent",
            hidden_by=("state-unwritable",),
        ),
        Condition(
            "energy-source",
            Severity.WARNING,
            "a power sensor fails",
            "{source}: {reason}",
            "{cure}",
        ),
        Condition(
            "energy-ledger",
            Severity.ERROR,
            "the energy ledger cannot be written",
            "{reason}",
            "{cure}",
            hidden_by=("state-unwritable",),
        ),
        Condition(
            "energy-flash-wear",
            Severity.WARNING,
            "writes to flash cannot be counted",
            "{reason}",
            "{cure}",
        ),
        Condition(
            "no-discovery",
            Severity.WARNING,
            "other agents cannot be discovered",
            "{reason}",
            "see `port-agent doctor`; discover = false under [peers] in config.toml turns it off. Training continues",
        ),
        Condition(
            "no-fleet",
            Severity.WARNING,
            "paired devices cannot be reached",
            "{reason}",
            "see `port-agent peer list`; training continues",
        ),
        Condition(
            "loop-stalled",
            Severity.WARNING,
            "the supervisor was blocked",
            "its event loop was blocked for {stall}",
            "the machine may have been suspended; otherwise check for a failing disk",
        ),
    )
}
"""All conditions that this program knows; reporting another code is a programming error."""


def remedy_of(code: str, **values: object) -> str:
    """Return the remedy of a condition; `values` are those that the remedy names."""
    return CONDITIONS[code].remedy.format(**values)


@dataclass(slots=True)
class _Open:
    condition: Condition
    values: Mapping[str, object]
    since_s: float
    since_wall: float
    expires_s: float | None


class HealthBoard:
    """The conditions that hold now, by code and key (a sensor's name, a job's id)."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _Open] = {}

    def report(
        self,
        code: str,
        now_s: float,
        wall_s: float,
        *,
        key: str = "",
        lasts_s: float | None = None,
        **values: object,
    ) -> None:
        """Report that a condition holds; `since` stays that of the first report. `lasts_s` clears it automatically."""
        expires = None if lasts_s is None else now_s + lasts_s
        known = self._open.get((code, key))
        if known is None:
            self._open[code, key] = _Open(CONDITIONS[code], values, now_s, wall_s, expires)
        else:
            known.values, known.expires_s = values, expires

    def clear(self, code: str, key: str = "") -> None:
        """Report that a condition no longer holds."""
        self._open.pop((code, key), None)

    def keep_only(self, code: str, keys: set[str]) -> None:
        """Clear every condition of `code` whose key is not in `keys`."""
        for found, key in list(self._open):
            if found == code and key not in keys:
                del self._open[found, key]

    def holds(self, code: str, key: str = "") -> bool:
        """Return whether a condition is reported, visible or not."""
        return (code, key) in self._open

    def items(self, now_s: float) -> list[HealthItem]:
        """Return the items to show now, the worst first."""
        for name, entry in list(self._open.items()):
            if entry.expires_s is not None and entry.expires_s <= now_s:
                del self._open[name]
        visible = {
            name: entry
            for name, entry in self._open.items()
            if now_s - entry.since_s >= entry.condition.visible_after_s
        }
        codes = {code for code, _ in visible}
        items = [
            _item(key, entry)
            for (_, key), entry in visible.items()
            if not codes.intersection(entry.condition.hidden_by)
        ]
        return sorted(items, key=lambda item: (-item.severity, item.since_s, item.code, item.key))


def _item(key: str, entry: _Open) -> HealthItem:
    condition = entry.condition
    return HealthItem(
        code=condition.code,
        key=key,
        severity=condition.severity,
        title=condition.title,
        text=condition.text.format(**entry.values),
        remedy=condition.remedy.format(**entry.values),
        since_s=entry.since_s,
        since_wall=entry.since_wall,
    )
