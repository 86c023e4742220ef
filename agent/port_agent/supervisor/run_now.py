"""The user's word that one job is to run now: whoever uses the device and whatever the time is."""

from dataclasses import dataclass, replace

from port_agent.policy.decide import Policy


@dataclass(frozen=True, slots=True)
class RunNow:
    """Which job, and until when on the clock of `Clock.uptime_s`; infinity: until it is over."""

    job_id: int
    until_s: float


def without_waiting(policy: Policy) -> Policy:
    """Return `policy` without what waits for a better time: presence, windows, the pause after a stop.

    What protects the machine stays: power, heat, memory, disk and its wear.
    """
    return replace(policy, idle_for_s=0.0, windows=(), min_pause_s=0.0)
