"""Share measured energy among jobs that run at the same time, by the CPU time of their workers.

A job that runs alone gets all of it. The idle power is shared like the power above it, because the machine is on for
none of the jobs in particular. A board's worker mostly waits for the serial line, and so gets little of either.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from port_agent.energy.attribution.one_job import Attributor, Charge, MeteredStep, PhaseCosts, StepEnergy
from port_agent.energy.attribution.timeline import Interval

CpuClock = Callable[[], float]
"""CPU seconds of a job's worker; it may restart at 0 when the worker ends."""


@dataclass(slots=True)
class _Job:
    attributor: Attributor
    cpu_s: CpuClock
    seen_s: float
    """Time at which `cpu_s` was last read."""
    rate: float = 0.0
    """CPU seconds per second over the last interval, for a job whose worker has ended by the end of the interval."""

    def take_cpu_s(self, seconds: float) -> float:
        """Return the CPU seconds since the last call, which was `seconds` ago."""
        now_s = self.cpu_s()
        used_s = now_s - self.seen_s if now_s >= self.seen_s else self.rate * seconds
        self.seen_s = now_s
        self.rate = used_s / seconds if seconds > 0 else 0.0
        return used_s


class JobsAttributor:
    """Attributes intervals to jobs, or to idling if none is running."""

    def __init__(self, costs: PhaseCosts, baseline_watts: Callable[[str], float | None]) -> None:
        """`baseline_watts` returns the idle power by the name of the source; None while it is unknown."""
        self._costs, self._baseline_watts = costs, baseline_watts
        self._idle = self._attributor()
        self._jobs: dict[str, _Job] = {}
        self._ended: list[Attributor] = []

    @property
    def busy(self) -> bool:
        """Whether any job is running and not paused."""
        return any(job.attributor.busy for job in self._jobs.values())

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs with a worker, paused or not, the oldest first."""
        return tuple(self._jobs)

    def start_job(self, job: str, now_s: float, cpu_s: CpuClock) -> None:
        """Record that the worker of `job` exists from now on."""
        if job in self._jobs:
            self.stop_job(job, now_s)
        made = self._jobs[job] = _Job(self._attributor(), cpu_s, cpu_s())
        made.attributor.start_job(job, now_s)

    def stop_job(self, job: str, now_s: float) -> None:
        """Record that the worker is gone; what it did since its last step counts as `other`."""
        ended = self._jobs.pop(job).attributor
        ended.stop_job(now_s)
        self._ended.append(ended)

    def pause(self, job: str, now_s: float) -> None:
        """Record that the worker is paused from now on."""
        self._jobs[job].attributor.pause(now_s)

    def resume(self, job: str, now_s: float) -> None:
        """Record that the worker computes again."""
        self._jobs[job].attributor.resume(now_s)

    def finish_step(self, job: str, event: MeteredStep, now_s: float) -> None:
        """Record that a step of a job ended now and took `event.wall_s`."""
        self._jobs[job].attributor.finish_step(event, now_s)

    def add(self, interval: Interval) -> Mapping[str, float]:
        """Add the energy of an interval that begins where the last one ended, and in which no job started or paused.

        Returns each job's share, by name; the shares sum to 1, and "" stands for no job.
        """
        used_s = {name: job.take_cpu_s(interval.seconds) for name, job in self._jobs.items()}
        busy = [name for name, job in self._jobs.items() if job.attributor.busy]
        total_s = sum(used_s[name] for name in busy)
        shares = {name: used_s[name] / total_s if total_s > 0 else 1 / len(busy) for name in busy}
        for name, share in shares.items():
            self._jobs[name].attributor.add(_shared(interval, share) if len(busy) > 1 else interval)
        if not busy:
            self._idle.add(interval)
        return shares or {"": 1.0}

    def settle(self, now_s: float) -> tuple[list[Charge], list[StepEnergy]]:
        """Return the charges and steps that became final by `now_s`."""
        charges: list[Charge] = []
        steps: list[StepEnergy] = []
        for attributor in (self._idle, *self._ended, *(job.attributor for job in self._jobs.values())):
            settled, done = attributor.settle(now_s)
            charges += settled
            steps += done
        self._ended.clear()
        return charges, steps

    def _attributor(self) -> Attributor:
        return Attributor(self._costs, self._baseline_watts)


def _shared(interval: Interval, share: float) -> Interval:
    joules = None if interval.joules is None else interval.joules * share
    return replace(interval, joules=joules, share=interval.share * share)
