"""Executors of a bundle's programs: made once for a plan, with what they share, and stopped by one gate."""

from pathlib import Path

import pytest

from port_agent.training.step_values import GraphChangedError
from tests.agent.training.trained_job import trainer


@pytest.mark.slow
def test_a_plan_has_one_executor_of_a_graph_and_plans_share_its_scratch_files(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.start()
    first = t.executors.of("step")
    assert t.executors.of("step") is first and t.executors.of("eval") is not first
    scratch = t.executors.scratch["step"]
    t.use_plan(0)
    other = t.executors.of("step")
    assert other is not first and t.executors.scratch["step"] is scratch
    t.use_plan(1)
    assert t.executors.of("step") is first
    with pytest.raises(GraphChangedError, match="no graph 'step@3'"):
        t.executors.of("step@3")
    t.close()


@pytest.mark.slow
def test_an_interruption_reaches_executors_that_are_there_and_those_to_come_and_ends_at_the_gate(
    tmp_path: Path,
) -> None:
    t = trainer(tmp_path)
    t.start()
    passed = []
    t.executors.gate = lambda: passed.append(t.step)
    there = t.executors.of("step")
    assert not there.interrupted
    t.interrupt()
    assert there.interrupted and t.executors.of("eval").interrupted
    t.train(lambda _: None, lambda *_: None)
    assert passed == [0] and not t.executors.interrupted and not there.interrupted
    t.close()
