"""Jobs as strangers write them: losses, networks, optimizers, and state kept where a bundle has no place for it."""

from collections.abc import Callable

from benchmarks.follow_zoo.stranger_jobs import late, losses, networks, optimizers, state
from port_planner.job import TrainingJob


def registered() -> dict[str, Callable[[], TrainingJob]]:
    """Return what makes each job, by name."""
    return {
        f"{part.JOBS.subject}/{name}": make
        for part in (losses, networks, optimizers, state, late)
        for name, make in part.JOBS.makers.items()
    }
