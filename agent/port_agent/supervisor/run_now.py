"""The user's request to run one job now, even while the device is in use or outside of the time windows."""

from dataclasses import dataclass, replace

from port_agent.policy.decide import Policy


@dataclass(frozen=True, slots=True)
class RunNow:
    """A job to train at once, and the end by `Clock.uptime_s`; infinity: until the job ends."""

    job_id: int
    until_s: float


def without_waiting(policy: Policy) -> Policy:
    """Return `policy` without the rules that wait for a better time: presence, windows, the pause after a stop.

    The rules that protect the machine stay: power, heat, memory, disk and its wear.
    """
    return replace(policy, idle_for_s=0.0, windows=(), min_pause_s=0.0)
