"""The user's request that one job runs now, also while the device is in use and outside of the time windows."""

from dataclasses import dataclass, replace

from port_agent.policy.decide import Policy


@dataclass(frozen=True, slots=True)
class RunNow:
    """A job to train at once, and until when by `Clock.uptime_s`; infinity: until the job ends."""

    job_id: int
    until_s: float


def without_waiting(policy: Policy) -> Policy:
    """Return `policy` without what waits for a better time: presence, windows, the pause after a stop.

    What protects the machine stays: power, heat, memory, disk and its wear.
    """
    return replace(policy, idle_for_s=0.0, windows=(), min_pause_s=0.0)
