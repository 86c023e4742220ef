"""A job's graphs in pieces: compared in a process of its own, what differs left whole and named, costs measured anew."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agent.prepare import slices
from agent.prepare.bundle import TrialError
from agent.prepare.slices import compared, in_halves, in_pieces
from planner import make_bundle
from planner.ir.bundle.bundle import NO_LIMITS
from planner.ir.costs import CostTable, OpCost
from planner.ir.graph import StepGraph
from planner.job import TrainingJob
from planner.profiling.operators import Measured
from planner.search.floor import floor_of
from planner.slices import pieces
from planner.slices.comparison import Differing
from planner.slices.gradients import CONVOLUTION_BACKWARD, WHAT, split_gradients
from planner.slices.rewriting import Replacement, Rewritten
from tests.agent.exactness import OPTIMIZERS
from tests.agent.jobs_small import make_job
from tests.planner.slices.language_step import language_batch, language_loss, language_model
from tests.planner.steps import costs_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def whole() -> tuple[make_bundle.Prepared, Measured]:
    made = make_bundle.prepare(make_job())
    tables = tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in graph.ops) for graph in made.graphs.values())
    return made, Measured(tables, 100, 10)


def test_a_job_with_a_convolution_is_halved_and_measured_again() -> None:
    prepared, measured = whole()
    sliced = in_halves(prepared, measured, 1, 2.0, lambda *_: None)
    assert sliced.left_whole == ()
    assert sliced.measured.base_bytes == 100
    for (name, graph), ops in zip(sliced.prepared.graphs.items(), sliced.measured.ops, strict=True):
        before = prepared.graphs[name]
        halved = sum(op.name == CONVOLUTION_BACKWARD and len(op.outputs) == 3 for op in before.ops)
        assert len(ops) == len(graph.ops) == len(before.ops) + halved
        assert halved == (0 if name.startswith("eval") else 1)
        assert all(cost.seconds > 0 for cost in ops)


def test_what_differs_here_is_left_whole_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, measured = whole()

    def odd(_: StepGraph, rewritten: Rewritten, __: int) -> tuple[Differing, ...]:
        return tuple(Differing(replacement, "the third byte differs") for replacement in rewritten.replacements)

    monkeypatch.setattr(slices, "compared", odd)
    sliced = in_halves(prepared, measured, 1, 2.0, lambda *_: None)
    assert sliced.prepared.graphs == prepared.graphs
    assert sliced.measured == measured
    assert set(sliced.left_whole) == {f"{WHAT}: the third byte differs"}


def test_a_comparison_that_ends_otherwise_is_an_error() -> None:
    graph = whole()[0].graphs["step"]
    rewritten = split_gradients(graph)
    damaged = replace(rewritten.graph, storages=rewritten.graph.storages[:-1])
    with pytest.raises(TrialError, match="comparing operators in pieces ended"):
        compared(graph, replace(rewritten, graph=damaged), 1)


def test_chains_run_in_pieces_where_that_is_cheaper_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 50_000)
    made = make_bundle.prepare(
        TrainingJob(
            language_model(), language_loss, OPTIMIZERS["adamw"](language_model().parameters()),
            [torch.cat(columns) for columns in zip(language_batch(0), language_batch(1), strict=True)], 8,
        )
    )  # fmt: skip
    graph = made.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    halved = in_halves(made, Measured((costs_of(graph).ops,), 0, 0), 1, 2.0, lambda *_: None)
    roomy = in_pieces(halved, device, 1 << 40, 1, lambda *_: None, NO_LIMITS)
    assert roomy is halved
    least = floor_of(graph, CostTable(device, halved.measured.ops[0])).nbytes
    tight = in_pieces(halved, device, least - (1 << 17), 1, lambda *_: None, NO_LIMITS)
    assert tight.in_pieces and tight.left_whole == ()
    assert floor_of(tight.prepared.graphs["step"], CostTable(device, tight.measured.ops[0])).nbytes < least
    odd = [Differing(Replacement((i,), (), "all"), "differs") for i in range(len(graph.ops))]
    monkeypatch.setattr(slices, "compared", lambda *_: tuple(odd))
    assert in_pieces(halved, device, least, 1, lambda *_: None, NO_LIMITS).in_pieces == ()
