"""From a job to graphs, tables and a bundle: every batch size has its graph, and what cannot
be trained on is refused.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from port_planner.base.errors import CaptureError, StatefulStepError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import PlannedLimits
from port_planner.ir.costs import DeviceCosts, Flash, OpCost
from port_planner.ir.graph import GraphError, Phase
from port_planner.ir.known_steps import KnownSteps
from port_planner.ir.spelled_schedule import SpelledSchedule
from port_planner.job import JobError, ScriptError, TrainingJob
from port_planner.make_bundle import InfeasibleError, default_planner, plan_all, prepare, tensor_chunks, write
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.plan_step import PlanResult
from port_planner.steps_ahead import known_steps
from tests.planner.tied_job import ROWS, job

NO_TRAINING = MeasuredCosts((), 0, 0)
DEVICE = DeviceCosts("test", 0, 1.0, 1.0, Flash("card", 1e8, 1e8, 1e-4, 1e-9, 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        ({}, ["step", "step@2"]),
        ({"drop_last": True}, ["step"]),
        ({"batch_size": 5}, ["step"]),
        ({"batch_size": ROWS}, ["step"]),
        ({"eval_data": [torch.randn(9, 4), torch.randn(9, 4)]}, ["step", "step@2", "eval", "eval@1"]),
        ({"eval_data": [torch.randn(3, 4), torch.randn(3, 4)]}, ["step", "step@2", "eval@3"]),
        ({"drop_last": True, "eval_data": [torch.randn(6, 4), torch.randn(6, 4)]}, ["step", "eval", "eval@2"]),
        ({"eval_data": [torch.randn(0, 4), torch.randn(0, 4)]}, ["step", "step@2"]),
        ({"accumulate": 2, "batch_size": 5}, ["first", "last"]),
        ({"accumulate": 3, "batch_size": 5}, ["first", "last", "next"]),
    ],
)
def test_every_size_of_batch_that_will_come_has_its_graph(changes: dict[str, Any], graphs: list[str]) -> None:
    captured = prepare(job(**changes))
    assert sorted(captured.graphs) == sorted(graphs)
    for name, graph in captured.graphs.items():
        rows = int(name.partition("@")[2] or job(**changes).batch_size)
        assert {graph.values[v].shape[0] for v in graph.batch} == {rows}
        assert any(op.phase is Phase.UPDATE for op in graph.ops) is (name.partition("@")[0] in ("step", "last"))


def test_the_result_is_the_models_state_tied_tensors_once() -> None:
    captured = prepare(job())
    assert captured.result == ("first.weight", "spare.bias", "spare.weight")
    assert set(captured.unused) == {"spare.bias", "spare.weight"}
    assert "buffer/hidden" in captured.tensors or any(key.startswith("constant/") for key in captured.tensors)


def test_a_step_that_counts_is_refused_unless_its_program_can_be_run_ahead() -> None:
    def counted() -> TrainingJob:
        made, calls = job(), itertools.count(1)
        plain = made.loss_fn
        return replace(made, loss_fn=lambda model, *batch: plain(model, *batch) / next(calls))

    with pytest.raises(StatefulStepError, match="was called with"):
        prepare(counted(), updates=3)

    def refused(updates: int, schedule: SpelledSchedule) -> KnownSteps:
        raise CaptureError("it does not start")

    with pytest.raises(CaptureError, match="followed without contents: it does not start"):
        prepare(counted(), updates=3, ahead=refused)
    found = prepare(counted(), updates=3, ahead=lambda updates, schedule: known_steps(counted(), updates, 60, schedule))
    assert found.known is not None and found.known.updates == 3
    (plain,) = {graph.scalars for graph in prepare(job()).graphs.values()}
    assert {graph.scalars for graph in found.graphs.values()} == {plain + 1}


@pytest.mark.parametrize("what", ["a count", "a result"])
def test_what_a_step_leaves_shows_before_the_first_steps_are_followed(what: str) -> None:
    """Where full batches are recorded again as they are followed, too: later no program is run ahead."""

    def leaving() -> TrainingJob:
        made, left = job(batch_size=2), dict[str, Any](calls=0, results=[])
        plain = made.loss_fn

        def loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = plain(model, *batch)
            if what == "a count":
                left["calls"] += 1
            else:
                left["results"].append(found.detach())
            return found

        return replace(made, loss_fn=loss)

    assert prepare(job(batch_size=2), updates=3, followed=2).tapes
    found = prepare(
        leaving(), updates=3, followed=2, ahead=lambda updates, schedule: known_steps(leaving(), updates, 60, schedule)
    )
    assert found.known is not None and not found.tapes


@pytest.mark.parametrize("followed", [0, 2])
def test_constants_that_a_program_makes_in_its_first_step_are_recorded_as_they_are_then(followed: int) -> None:
    """Constants are recorded for each shape, except those computed from a first batch that is not recorded first."""

    def remembering(make: Callable[[torch.Tensor], torch.Tensor]) -> TrainingJob:
        made, kept = job(), dict[int, torch.Tensor]()
        plain = made.loss_fn

        def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if len(x) not in kept:
                kept[len(x)] = make(x).detach()
            found: torch.Tensor = plain(model, x * kept[len(x)], y)
            return found

        return replace(made, loss_fn=loss)

    ramp = prepare(remembering(lambda x: torch.linspace(0.5, 1.5, len(x)).unsqueeze(1)), followed=followed)
    assert all("aten::linspace" not in {op.name for op in graph.ops} for graph in ramp.graphs.values())
    assert len([key for key in ramp.tensors if key.startswith("constant/")]) >= len(ramp.graphs) == 2
    for make in (lambda x: x.std(0), lambda x: torch.rand(4)):
        with pytest.raises(CaptureError, match="that an earlier step created and the program kept"):
            prepare(remembering(make), followed=followed)


def test_capturing_changes_neither_the_model_nor_the_generator() -> None:
    made = job(lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    before = copy.deepcopy(made.model.state_dict())
    generator = torch.get_rng_state()
    lr, last = made.optimizer.param_groups[0]["lr"], made.scheduler.last_epoch
    prepare(made, updates=5)
    assert all(torch.equal(before[key], value) for key, value in made.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (made.optimizer.param_groups[0]["lr"], made.scheduler.last_epoch) == (lr, last)


@pytest.mark.slow
def test_the_schedule_is_what_plain_training_would_see() -> None:
    def warm_up(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 3))

    rows = prepare(job(warm_up), updates=5).schedule
    assert [row[0]["lr"] for row in rows[:5]] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1])
    assert set(rows[0][0]) == {"lr"}, "what does not change stands in the optimizer"
    assert prepare(job()).schedule == ()


@pytest.mark.slow
def test_a_schedule_is_known_for_some_epochs_more_as_far_as_it_goes() -> None:
    """Three batches an epoch: training takes another number of epochs than `plan` was told, more often than not."""
    assert len(prepare(job(lambda o: torch.optim.lr_scheduler.StepLR(o, 1)), updates=3).schedule) == 30
    ends = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=7)
    assert len(prepare(job(ends), updates=3).schedule) == 7
    with pytest.raises(ScriptError, match="scheduler's step 8 of the 8 that are planned"):
        prepare(job(ends), updates=8)


@pytest.mark.slow
def test_weights_that_no_file_holds_are_refused_before_anything_is_trained() -> None:
    complex64, complex128 = job(), job()
    complex64.model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    complex128.model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    assert "phase" in prepare(complex64).result
    with pytest.raises(JobError, match="phase of the model is complex128, which no file of weights holds"):
        prepare(complex128)


@pytest.mark.slow
def test_a_teacher_that_follows_is_as_before_though_the_optimizer_does_not_have_it() -> None:
    made = job()
    made.model.spare.requires_grad_(False)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.get_parameter("spare.weight").lerp_(model.get_parameter("first.weight")[:1], 0.5)
        return nn.functional.mse_loss(model(x) * model.get_submodule("spare")(x).detach(), y)

    made.loss_fn = loss
    made.optimizer = torch.optim.SGD([made.model.get_parameter("first.weight")], lr=0.1)
    before = made.model.get_parameter("spare.weight").clone()
    captured = prepare(made)
    assert torch.equal(made.model.get_parameter("spare.weight"), before)
    kept = captured.tensors["parameter/spare.weight"]
    assert isinstance(kept, torch.Tensor) and torch.equal(kept, before)


def with_hooks(pack: Callable[[torch.Tensor], torch.Tensor]) -> TrainingJob:
    """Return a job whose backward pass gets what `pack` makes of the tensors that the forward pass saved."""
    hooked = job(data=[torch.randn(ROWS, 4), torch.randint(0, 4, (ROWS,))])

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (pack(t),), lambda saved: saved[0]):
            return nn.functional.cross_entropy(model(x), y)

    hooked.loss_fn = loss
    return hooked


@pytest.mark.slow
def test_saved_tensors_that_are_exchanged_for_others_are_refused_when_planned() -> None:
    """The backward pass would read labels that no operator of the bundle checks."""
    with pytest.raises(GraphError, match=r"nll_loss_backward.*saved_tensors_hooks"):
        prepare(with_hooks(lambda t: t * 1))


@pytest.mark.slow
def test_saved_tensors_may_be_exchanged_for_copies() -> None:
    names = [op.name for op in prepare(with_hooks(torch.clone)).graphs["step"].ops]
    assert names.index("aten::clone") < names.index("aten::nll_loss_backward")


def test_an_error_in_the_loss_shows_the_users_lines_alone() -> None:
    wrong = job(data=[torch.randn(ROWS, 4), torch.full((ROWS,), 9)])
    wrong.loss_fn = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
    with pytest.raises(ScriptError, match="Target 9 is out of bounds") as caught:
        prepare(wrong)
    text = str(caught.value)
    assert (
        "nn.functional.cross_entropy(model(x), y)" in text
        and "loss_fn(model, *batch) on a batch of float32 [4, 4], int64 [4]" in text
    )
    assert "recorder.py" not in text and "site-packages" not in text and caught.value.exit_code == 2


def flat(graphs: Sequence[Any]) -> MeasuredCosts:
    return MeasuredCosts(tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in graph.ops) for graph in graphs), 0, 0)


@pytest.mark.slow
def test_a_bundle_holds_what_was_captured(tmp_path: Path) -> None:
    held_out = [torch.randn(3, 4), torch.randn(3, 4)]
    captured = prepare(job(seed=7, eval_data=held_out, name="birds"), updates=2)
    plans, costs = plan_all(
        captured,
        flat(list(captured.graphs.values())),
        DEVICE,
        1 << 30,
        default_planner(strategy="greedy", time_limit_s=1.0),
    )
    manifest = write(
        tmp_path / "b.port", captured, [plans, plans], costs, [1 << 30, 1 << 29], threads=2, estimated=True
    )
    bundle = Bundle(tmp_path / "b.port")
    assert bundle.manifest == manifest
    assert (manifest.name, manifest.seed, manifest.threads, manifest.samples, manifest.eval_samples) == (
        "birds",
        7,
        2,
        ROWS,
        3,
    )
    assert manifest.estimated and [choice.ram_bytes for choice in manifest.plans] == [1 << 30, 1 << 29]
    assert manifest.plans[0].peak_bytes == max(plan.peak_bytes for plan in plans.values())
    assert bundle.graphs == captured.graphs and bundle.costs == costs


def test_the_graph_that_does_not_fit_is_named_with_what_it_needs() -> None:
    captured = prepare(job())
    with pytest.raises(InfeasibleError, match="graph 'step': ") as caught:
        plan_all(
            captured,
            flat(list(captured.graphs.values())),
            DEVICE,
            16,
            default_planner(strategy="greedy", time_limit_s=1.0),
        )
    assert caught.value.needed_bytes is not None and caught.value.needed_bytes > 16
    assert caught.value.fastest_seconds is None


def test_the_error_tells_what_is_whole_and_why_once_each_and_no_more_than_a_few() -> None:
    error = InfeasibleError("no plan fits", None)
    assert str(error) == "no plan fits"
    error.left_whole = ("mm in 6 blocks: row 3 differs", "mm in 6 blocks: row 3 differs")
    assert (
        str(error) == "no plan fits. Not tiled, because tiles give different bits here: mm in 6 blocks: row 3 differs"
    )
    error.left_whole = tuple(f"chain {n}: row 0 differs" for n in range(5))
    assert str(error).endswith("chain 2: row 0 differs; and 2 more")


def test_the_error_names_what_would_do_and_whether_that_was_tried() -> None:
    error = InfeasibleError("no plan fits", (200 << 20) + 1, remedy="use a smaller batch")
    assert str(error) == "no plan fits; raise --ram to at least 201M, or use a smaller batch"
    error.is_tried = True
    assert str(error).endswith("; raise --ram to 201M, within which a trial of it kept, or use a smaller batch")
    assert str(InfeasibleError("no plan fits", 99, option="--gpu-ram")).endswith("; raise --gpu-ram to at least 99")
    assert str(InfeasibleError("too slow", None, remedy="move the deadline")) == "too slow; move the deadline"


@pytest.mark.slow
def test_a_deadline_is_for_training_and_not_for_evaluation() -> None:
    captured = prepare(job(eval_data=[torch.randn(ROWS, 4)] * 2))
    asked = default_planner(strategy="greedy", time_limit_s=1.0, limits=PlannedLimits(step_s=1e-9))
    results: dict[str, PlanResult] = {}
    for name, graph in captured.graphs.items():
        costs = {name: flat([graph]).ops[0]}
        results[name] = asked(graph, _table(costs[name]), 1 << 30)
    assert results["step"].plan is None and results["step"].fastest_seconds is not None
    assert results["eval"].plan is not None


def _table(ops: Sequence[OpCost]) -> Any:
    from port_planner.ir.costs import CostTable

    return CostTable(DEVICE, tuple(ops))


@pytest.mark.parametrize("count", [0, 1, 1 << 18, (1 << 18) + 1])
def test_tensors_are_written_in_chunks_of_a_mebibyte(count: int) -> None:
    tensor = torch.arange(count, dtype=torch.float32)
    chunks = tensor_chunks(tensor)
    found = [bytes(chunk) for chunk in chunks.chunks()]
    assert b"".join(found) == tensor.numpy().tobytes() and len(found) == math.ceil(4 * count / (1 << 20))
