"""A call that needs more than there is runs on a part of its rows."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import StepGraph
from port_planner.profiling import operator_profile
from port_planner.profiling.calls import Call
from port_planner.profiling.operator_profile import profile_operators

ROWS, CLASSES = 64, 5000


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    batch = torch.randn(ROWS, 4), torch.randint(0, CLASSES, (ROWS,))
    return capture_step(model, loss, optimizer, batch).graphs["step"]


def call_of(graph: StepGraph, name: str) -> Call:
    (op,) = (op for op in graph.ops if op.name.partition(".")[0] == f"aten::{name}")
    return Call(graph, op, frozenset())


def test_a_part_of_the_rows_is_run_where_the_whole_has_no_room(graph: StepGraph) -> None:
    whole = call_of(graph, "_log_softmax_backward_data")
    assert whole.need_bytes == 3 * 4 * ROWS * CLASSES and whole.within(whole.need_bytes) is whole
    part = whole.within(whole.need_bytes / 5)
    assert (part.rows, part.parts, part.need_bytes) == (ROWS, 8, whole.need_bytes // 8)
    assert part.ready()[0]().shape == (ROWS // 8, CLASSES)


def test_what_belongs_to_the_rows_is_cut_and_the_rest_is_not(graph: StepGraph) -> None:
    part = call_of(graph, "nll_loss_backward").within(4 * ROWS * CLASSES)
    assert part.parts == 4 and part.ready()[0]().shape == (ROWS // 4, CLASSES)


def test_what_does_not_run_on_fewer_rows_runs_whole(graph: StepGraph) -> None:
    """As many rows as there are, and a product of which one operand lies in columns."""
    for name, limit in (("_log_softmax", 16), ("mm", 1000)):
        whole = call_of(graph, name)
        assert whole.within(limit) is whole


def test_what_a_kernel_left_for_its_backward_pass_is_never_cut() -> None:
    """An LSTM's workspace has one dimension: a part of it would have too few bytes for the rows
    that the kernel knows of.
    """
    model = nn.LSTM(64, 128, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x)[0].square().mean(), optimizer, (torch.randn(8, 16, 64),)).graphs[
        "step"
    ]
    backward = call_of(graph, "mkldnn_rnn_layer_backward")
    assert backward.within(backward.need_bytes / 2) is backward


@pytest.mark.slow
def test_such_an_operator_costs_as_many_times_more_which_is_not_kept(
    graph: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def timed(calls: list[Call], sweep: object) -> list[tuple[float, int]]:
        seen.extend(call.parts for call in calls)
        return [(1.0, 10) for _ in calls]

    monkeypatch.setattr(operator_profile, "timed", timed)
    monkeypatch.setattr(operator_profile, "resident_bytes", lambda: 0)
    monkeypatch.setattr(operator_profile, "last_level_bytes", lambda: 0)
    monkeypatch.setattr(operator_profile, "_LOADED_BYTES", 0)
    (costs,) = profile_operators([graph], compute_watts=1.0, kept_in=tmp_path, ram_bytes=10 * ROWS * CLASSES).ops
    (fat,) = (i for i, op in enumerate(graph.ops) if op.name == "aten::_log_softmax_backward_data")
    assert seen.count(2) == 1 and (costs[fat].seconds, costs[fat].workspace_bytes) == (2.0, 20)
    seen.clear()
    profile_operators([graph], compute_watts=1.0, kept_in=tmp_path, ram_bytes=math.inf)
    assert seen == [1], "with more memory it is measured whole"
