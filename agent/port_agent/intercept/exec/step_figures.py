"""The figures of a program's steps, as reported to its agent."""

import time
from dataclasses import dataclass

from port_agent.intercept.budget import Report
from port_agent.worker.protocol import StepDone


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Work and time up to a moment."""

    steps: int
    wall_s: float
    cpu_s: float
    stall_s: float
    read_bytes: int
    written_bytes: int
    unworn_bytes: int
    peak_bytes: int

    @classmethod
    def now(cls, steps: int, report: Report) -> "StepFigures":
        """Return the figures of this process, under the budget of this report."""
        return cls(
            steps,
            time.perf_counter(),
            time.process_time(),
            report.stall_seconds,
            report.read_bytes,
            report.written_bytes,
            report.unworn_bytes,
            report.peak_resident_bytes,
        )

    def step_since(self, before: "StepFigures", loss: float | None = None, total_steps: int | None = None) -> StepDone:
        """Return the figures of the steps since `before`, as an event."""
        return StepDone(
            step=self.steps,
            epoch=0,
            loss=loss,
            wall_s=self.wall_s - before.wall_s,
            cpu_s=self.cpu_s - before.cpu_s,
            phases_s={"stall": self.stall_s - before.stall_s},
            paged_in_bytes=self.read_bytes - before.read_bytes,
            paged_out_bytes=self.written_bytes - before.written_bytes,
            unworn_bytes=self.unworn_bytes - before.unworn_bytes,
            peak_rss_bytes=self.peak_bytes,
            total_steps=total_steps,
        )
