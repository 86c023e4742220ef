"""Batches of several shapes: a graph for each, chosen before the step; the numbers of plain
PyTorch, or refused by name.
"""

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from port_agent.prepare.reference import compared_steps
from port_agent.training.samples.columns import DataError
from port_agent.training.trainer import StepEvent, Trainer
from port_planner import make_bundle
from port_planner.base.errors import CaptureError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.data_order import bucket_batches
from port_planner.ir.bundle.manifest import BUCKETS_FORMAT, BucketSize, BundleError, bucket_of
from port_planner.ir.costs import DeviceCosts, Flash, OpCost
from port_planner.job import TrainingJob
from port_planner.job_sources import as_job
from port_planner.plain_steps import plain_losses
from port_planner.profiling.operator_profile import MeasuredCosts
from tests.agent.jobs_small import write_job
from tests.agent.training.options import train_options

LENGTHS = (3, 8, 5)
VOCABULARY = 20
STEPS = 14


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(VOCABULARY, 16), nn.Dropout(0.1)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, VOCABULARY)
        self.long = nn.Linear(16, 16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.drop(torch.tanh(self.layer(self.words(words)))))
        return result


def batches() -> list[dict[str, Any]]:
    """Eleven batches of three lengths, the last of one of them short."""
    torch.manual_seed(1)
    rows = [(6, length) for length in LENGTHS for _ in range(3)] + [(6, 3), (2, 5)]
    return [{"words": torch.randint(VOCABULARY, shape), "scale": 1.0 / shape[1]} for shape in rows]


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    words = batch["words"]
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()) * batch["scale"]


def make_job(accumulate: int = 1) -> TrainingJob:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW([*model.words.parameters(), *model.layer.parameters(), *model.head.parameters()])
    job = as_job((model, loss_fn, optimizer, batches()))
    assert job is not None
    job.accumulate = accumulate
    return job


def expected_losses(job: TrainingJob, steps: int) -> list[float]:
    buckets = [bucket.data for bucket in job.buckets]
    return list(plain_losses(job, job.data, steps, buckets=buckets))


def trained(trainer: Trainer) -> list[StepEvent]:
    events: list[StepEvent] = []
    with contextlib.closing(trainer):
        trainer.start()
        trainer.train(events.append, lambda *_: None)
    return events


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("plan", [0, 1])
def test_steps_of_all_shapes_are_plain_pytorchs(tmp_path: Path, accumulate: int, plan: int) -> None:
    path, expected = tmp_path / "job.port", expected_losses(make_job(accumulate), STEPS)
    job = make_job(accumulate)
    assert [tuple(bucket.data[0].shape[1:]) for bucket in job.buckets] == [(5,), (3,)]
    write_job(path, job, compared=STEPS)
    bundle = Bundle(path)
    assert bundle.manifest.format == BUCKETS_FORMAT and bundle.manifest.steps_per_epoch() == len(batches())
    assert {bucket_of(name) for name in bundle.graphs} == {0, 1, 2}
    events = trained(Trainer(bundle, train_options(tmp_path / "a", tmp_path, steps=STEPS, plan=plan, verify=STEPS)))
    assert [event.loss for event in events] == expected
    half = train_options(tmp_path / "b", tmp_path, steps=5, plan=plan)
    events = trained(Trainer(bundle, half))
    events += trained(Trainer(bundle, train_options(tmp_path / "b", tmp_path, steps=STEPS, plan=plan)))
    assert [event.loss for event in events] == expected


def branches_job() -> TrainingJob:
    """Return a job whose batches of one shape name the branch that their step takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 5))
    drawn = [torch.randn(4, 5) for _ in range(6)]
    named = [
        {"x": x, "task": task} for x, task in zip(drawn, ("copy", "sum", "copy", "double", "sum", "copy"), strict=True)
    ]

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        y = model(batch["x"])
        if batch["task"] == "sum":
            return y.sum(1).square().mean()
        return nn.functional.mse_loss(y, batch["x"] * (2 if batch["task"] == "double" else 1))

    job = as_job((model, loss, torch.optim.AdamW(model.parameters(), lr=0.01), named))
    assert job is not None
    return job


@pytest.mark.slow
def test_each_branch_that_a_batch_names_is_trained_as_plain_pytorch_does(tmp_path: Path) -> None:
    path, expected = tmp_path / "job.port", expected_losses(branches_job(), STEPS)
    write_job(path, branches_job(), compared=STEPS)
    bundle = Bundle(path)
    assert len({tuple(op.name for op in graph.ops) for graph in bundle.graphs.values()}) == 2, (
        "two of three differ by a number"
    )
    events = trained(Trainer(bundle, train_options(tmp_path / "a", tmp_path, steps=STEPS, verify=STEPS)))
    assert [event.loss for event in events] == expected


def test_the_steps_that_are_compared_show_every_bucket() -> None:
    job = make_job()
    parts = [(job.data, job.batch_size), *((bucket.data, bucket.batch_size) for bucket in job.buckets)]
    sizes = [BucketSize(len(data[0]), size) for data, size in parts]
    order = bucket_batches(7, sizes, drop_last=[False] * 3)
    seen = [next(order) for _ in range(2 * len(batches()))]
    assert {bucket for _, bucket, _ in seen[: compared_steps(job)]} == {0, 1, 2}
    for epoch in (0, 1):
        rows = Counter((bucket, row) for e, bucket, taken in seen if e == epoch for row in taken.tolist())
        assert len(rows) == sum(size.samples for size in sizes) and set(rows.values()) == {1}
    later = bucket_batches(7, sizes, drop_last=[False] * 3, start=13)
    for epoch, bucket, taken in seen[13:]:
        e, b, t = next(later)
        assert (e, b) == (epoch, bucket) and torch.equal(t, taken)


@pytest.mark.slow
def test_a_neighbours_plan_is_made_in_a_moment() -> None:
    """What a further shape costs beyond its recording: its plan is a quick one, or the neighbour's."""
    captured = make_bundle.prepare(make_job())
    asked: list[int] = []

    def planner(graph: Any, costs: Any, ram_bytes: int) -> Any:
        asked.append(len(graph.ops))
        return make_bundle.default_planner(strategy="greedy", time_limit_s=1.0)(graph, costs, ram_bytes)

    tables = tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in g.ops) for g in captured.graphs.values())
    device = DeviceCosts("test", 0, 1.0, 1.0, Flash("card", 1e8, 2e6, 1e-4, 1e-9, 1e-9))
    plans, _ = make_bundle.plan_all(captured, MeasuredCosts(tables, 0, 0), device, 1 << 40, planner)
    assert len(asked) == 1 and plans.keys() == captured.graphs.keys()


@pytest.mark.slow
def test_samples_that_arrive_go_to_the_bucket_of_their_shape(tmp_path: Path) -> None:
    path, inbox = tmp_path / "job.port", tmp_path / "in"
    write_job(path, make_job(), compared=0)
    inbox.mkdir()
    draw = np.random.default_rng(0)
    for i, length in enumerate((8, 3, 3, 5)):
        np.savez(inbox / f"{i}.npz", draw.integers(VOCABULARY, size=(6, length)))
    events = trained(Trainer(Bundle(path), train_options(tmp_path / "s", tmp_path, steps=8, data=inbox)))
    assert [event.epoch for event in events] == [0] * 4 + [1] * 4
    np.savez(inbox / "x.npz", draw.integers(VOCABULARY, size=(6, 4)))
    with pytest.raises(
        DataError,
        match=r"x\.npz has rows of int64 \[4\], but the bundle has steps for int64 \[8\]; int64 \[5\]; int64 \[3\]",
    ):
        Trainer(Bundle(path), train_options(tmp_path / "t", tmp_path, steps=8, data=inbox))


@pytest.mark.slow
def test_samples_that_arrive_for_one_of_several_branches_are_refused(tmp_path: Path) -> None:
    path, inbox = tmp_path / "job.port", tmp_path / "in"
    write_job(path, branches_job(), compared=0)
    inbox.mkdir()
    np.savez(inbox / "x.npz", np.ones((4, 5), np.float32))
    with pytest.raises(
        DataError, match=r"x\.npz has rows of float32 \[5\], for which the bundle has 3 steps that differ"
    ):
        Trainer(Bundle(path), train_options(tmp_path / "s", tmp_path, steps=8, data=inbox))


@pytest.mark.slow
def test_a_manifest_that_promises_other_buckets_is_refused(tmp_path: Path) -> None:
    write_job(tmp_path / "job.port", make_job(), compared=0)
    bundle = Bundle(tmp_path / "job.port")
    sizes = bundle.manifest.buckets
    for forged, message in (
        ((*sizes, BucketSize(4, 2)), "bucket 3 has 0 columns"),
        (sizes[:1], "graph step#2 is for bucket 2, the manifest has 2"),
        ((sizes[0], BucketSize(3, 6)), "the manifest says 3 samples"),
    ):
        bundle.manifest = replace(bundle.manifest, buckets=forged)
        with pytest.raises(BundleError, match=message):
            bundle.with_plans(bundle.manifest.plans, bundle.plans, bundle.costs)


@pytest.mark.slow
def test_shapes_that_train_other_weights_are_refused() -> None:
    """The optimizer's counts of updates would be one for each weight."""

    def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        more = model.long.weight.square().sum() if batch["words"].shape[1] > 5 else 0.0
        return loss_fn(model, batch) + more

    torch.manual_seed(0)
    model = Reader()
    job = as_job((model, loss, torch.optim.AdamW(model.parameters()), batches()))
    assert job is not None
    with pytest.raises(
        CaptureError, match=r"batches of int64 \[6, 5\] do not update the same tensors as .*long.weight"
    ):
        make_bundle.prepare(job)
