"""What a script makes alone is what its bundle makes, and where that is not so, it shows."""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from port_agent.prepare.referee.process import Follow, followed
from port_agent.training.comparison import MismatchError
from port_agent.training.trainer import Trainer
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import ExpectedResults, PlainRun
from port_planner.job import TrainingJob
from tests.agent.jobs_small import BATCH, make_job, write_job
from tests.agent.training.options import train_options

ROWS = 2 * BATCH + 2
"""Two full batches and a short one: of six batches, the fourth begins an epoch."""


def alone(job: TrainingJob, updates: int) -> PlainRun:
    """Run a job in this process as its script would, over the first rows of its data."""
    follow = Follow("", "", "", "cpu", 1, (ROWS,), True, updates, updates, 0.0, 0)
    found = followed(job, follow)
    return PlainRun(updates, (ROWS,), ExpectedResults(found.losses, checksums=found.ended), found.generators, "")


@functools.cache
def bundle_with(accumulate: int) -> Path:
    """Return a bundle of the small job, with what that makes alone of six batches."""
    folder = Path(tempfile.mkdtemp(prefix="port-referee-"))
    settings: dict[str, Any] = {"accumulate": accumulate, "clip_grad_norm": 0.5}
    write_job(folder / "job.port", make_job(**settings), plain=alone(make_job(**settings), 6 // accumulate))
    return folder / "job.port"


def refereed(
    folder: Path, plan: int, change: Callable[[PlainRun], PlainRun] = lambda run: run, accumulate: int = 1
) -> None:
    """Run a bundle beside what its script made alone, or beside what that was changed to."""
    t = Trainer(
        Bundle(bundle_with(accumulate)), train_options(folder, folder, plan, 6, verify=6, referee=True, discard=True)
    )
    t.manifest = replace(t.manifest, plain=change(t.manifest.plain))
    try:
        t.start()
        t.train(lambda _: None, lambda *_: None)
    finally:
        t.close()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bundle_goes_over_the_ends_of_epochs_as_its_script_does_alone(accumulate: int, tmp_path: Path) -> None:
    for plan in (0, 1):
        refereed(tmp_path / str(plan), plan, accumulate=accumulate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: replace(run, generators={"cpu": "0"}), "random generators of cpu differ"),
        (lambda run: replace(run, results=replace(run.results, losses=(*run.results.losses[:5], "0x1p+0"))), "step 6 gave the loss"),
        (lambda run: replace(run, results=replace(run.results, checksums={**run.results.checksums, "buffer/1.running_mean": "0"})), "1 of .* tensors have different bits .* "
        "buffer/1.running_mean first"),
    ],
)  # fmt: skip
def test_what_the_script_made_otherwise_is_told(
    change: Callable[[PlainRun], PlainRun], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MismatchError, match=message):
        refereed(tmp_path, 0, change)
