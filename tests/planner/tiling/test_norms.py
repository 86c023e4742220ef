"""Batch norms' backward passes by channels: the bits of the whole, in place where that may be; a slip is found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from port_planner.capture.step import Capture, capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.graph import StepGraph, Value, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.search.floor import floor_of
from port_planner.tiling import norms
from port_planner.tiling.gradients import split_gradients
from port_planner.tiling.in_place import write_in_place
from port_planner.tiling.norms import norms_by_channels
from port_planner.tiling.rewriting import compacted
from tests.agent.exactness import OPTIMIZERS, differences, plain, planned, random_plan
from tests.planner.steps import costs_of
from tests.planner.tiling.normed_step import normed, normed_batch, normed_loss


def capture() -> Capture:
    model = normed()
    return capture_step(model, normed_loss, OPTIMIZERS["sgd"](model.parameters()), normed_batch(0))


def step() -> StepGraph:
    return capture().graphs["step"]


@pytest.mark.parametrize("count", [2, 3])
def test_tiles_of_channels_have_the_bits_of_the_whole_and_the_graph_stays_one(count: int) -> None:
    graph = step()
    rewritten = norms_by_channels(graph, 1, count)
    small = compacted(rewritten.graph)
    verify_graph(small)
    verify_operands(small)
    assert [tile.count for tile in small.tiles] == [count] * 2
    assert len(rewritten.replacements) == 2 and differing(graph, rewritten) == ()
    assert len(rewritten.moved) == 1, "the gradient that the shortcut reads again is not overwritten"


def test_the_floor_of_a_norm_is_lower_and_what_is_thin_or_asked_for_stays_whole() -> None:
    graph = compacted(write_in_place(split_gradients(step()).graph).graph)
    (norm, *_) = (i for i, op in enumerate(graph.ops) if op.name == norms.NORM_BACKWARD)
    assert norms_by_channels(graph, 1 << 30, 3).replacements == ()
    assert len(norms_by_channels(graph, 1, 3, frozenset({norm})).replacements) == 1
    small = compacted(norms_by_channels(graph, 1, 3).graph)
    assert floor_of(graph, costs_of(graph)).name == norms.NORM_BACKWARD
    assert floor_of(small, costs_of(small)).nbytes < floor_of(graph, costs_of(graph)).nbytes


@pytest.mark.slow
def test_they_train_as_plain_pytorch_does_under_random_plans(tmp_path: Path) -> None:
    batches = [normed_batch(i) for i in range(2)]
    expected = plain(normed(), normed_loss, OPTIMIZERS["sgd"], batches)
    made = capture()
    made = replace(made, graphs={"step": compacted(norms_by_channels(made.graphs["step"], 1, 3).graph)})
    for seed in range(3):
        plan = random_plan(made.graphs["step"], seed)
        assert not differences(expected, planned(made, {"step": plan}, batches, tmp_path / str(seed))), seed


def test_a_boundary_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    part: Callable[[Value, int, int], Value] = norms._tile

    def late(value: Value, begin: int, end: int) -> Value:
        shifted = len(value.shape) > 1 and begin > 0
        return part(value, begin - shifted, end - shifted)

    monkeypatch.setattr(norms, "_tile", late)
    graph = step()
    assert len(differing(graph, norms_by_channels(graph, 1, 3))) == 2
