"""`train` as a function: the bits of the command, and refusals before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.foreground.train import TrainRequest, train
from port_agent.planning.request import RequestError
from port_agent.worker.protocol import Event, StepDone
from tests.agent.cli.plan.small_script import run
from tests.agent.jobs_small import small_bundle


@pytest.mark.process
def test_it_trains_to_the_bits_of_the_command(tmp_path: Path) -> None:
    request = TrainRequest(bundle=small_bundle(), out=tmp_path / "mine", state_dir=tmp_path / "state", digest=True)
    events: list[Event] = []
    half = train(replace(request, steps=2), events.append)
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2] and half.steps == 2
    rest = train(request)
    assert rest.steps > 0 and rest.last_loss is not None and rest.result is not None and rest.result.digest
    words = ("--out", str(tmp_path / "theirs"), "--state-dir", str(tmp_path / "other"))
    assert run(tmp_path, "train", str(small_bundle()), *words).returncode == 0
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="plans, counted from 0; there is no plan 9"):
        train(TrainRequest(bundle=small_bundle(), plan=9, state_dir=tmp_path))
