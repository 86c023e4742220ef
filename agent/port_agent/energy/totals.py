"""The energy that jobs and phases have used since the agent started."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from port_agent.energy.attribution.one_job import Charge, EnergyPhase, StepEnergy


@dataclass(frozen=True, slots=True)
class JobEnergy:
    """What a job has used since the agent started."""

    gross_joules: float = 0.0
    net_joules: float | None = 0.0
    steps: int = 0
    unmeasured_s: float = 0.0


class Totals:
    """Sums of settled charges and steps."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobEnergy] = {}
        self._phases: dict[EnergyPhase, float] = {}

    def begin(self, job: str) -> None:
        """Start counting `job` at zero, unless it is known."""
        self._jobs.setdefault(job, JobEnergy())

    def add(self, charges: Iterable[Charge], steps: Iterable[StepEnergy]) -> None:
        """Add newly settled charges and steps."""
        for charge in charges:
            self._phases[charge.phase] = self._phases.get(charge.phase, 0.0) + charge.gross_joules
            if charge.job:
                self._add_to_job(charge)
        for step in steps:
            job = self._jobs.get(step.job, JobEnergy())
            self._jobs[step.job] = replace(job, steps=job.steps + 1)

    def jobs(self) -> Mapping[str, JobEnergy]:
        """Return what each job has used."""
        return dict(self._jobs)

    def phase_joules(self) -> Mapping[EnergyPhase, float]:
        """Return the energy of each phase, as far as it was measured."""
        return {phase: joules for phase, joules in self._phases.items() if phase is not EnergyPhase.UNMEASURED}

    def _add_to_job(self, charge: Charge) -> None:
        old = self._jobs.get(charge.job, JobEnergy())
        unknown = old.net_joules is None or charge.net_joules is None
        self._jobs[charge.job] = JobEnergy(
            old.gross_joules + charge.gross_joules,
            None if unknown else (old.net_joules or 0.0) + (charge.net_joules or 0.0),
            old.steps,
            old.unmeasured_s + (charge.seconds if charge.phase is EnergyPhase.UNMEASURED else 0.0),
        )
