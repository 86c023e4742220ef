"""A small job trained in this process, to its end or until it is stopped."""

from pathlib import Path
from typing import Any

from port_agent.training.trainer import StepEvent, Trainer
from port_planner.ir.bundle.bundle import Bundle
from tests.agent.jobs_small import make_job, small_bundle, state_on_flash, write_job
from tests.agent.training.options import train_options

STEPS = 9


def trainer(folder: Path, *, steps: int = STEPS, plan: int = 1, accumulate: int = 1, **options: Any) -> Trainer:
    return Trainer(Bundle(small_bundle(accumulate)), train_options(folder, folder, plan, steps, **options))


class Stop(Exception):
    """The test ends the run here, as a power cut would: nothing is closed properly."""


def train(folder: Path, *, stop_after: int | None = None, **options: Any) -> tuple[list[float], str]:
    """Train to the end (or stop dead after a step); return the losses of this run and the digest of the state."""
    t = trainer(folder, **options)
    losses: list[float] = []

    def on_step(event: StepEvent) -> None:
        losses.append(event.loss)
        if event.step == stop_after:
            raise Stop

    try:
        t.start()
        t.train(on_step, lambda *_: None)
        return losses, t.digest()
    except Stop:
        return losses, ""
    finally:
        t.close()


# -- writes that go on into the next step


def paging_trainer(folder: Path) -> Trainer:
    """Return a trainer whose plan 1 writes optimizer state at the end of a step, to a medium that takes longer."""
    write_job(folder / "paging.port", make_job(), plan=state_on_flash)
    options = train_options(folder, folder, 1, STEPS, checkpoint_every=3, write_limit=2_000_000)
    return Trainer(Bundle(folder / "paging.port"), options)
