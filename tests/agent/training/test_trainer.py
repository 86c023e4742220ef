"""A bundle trained in this process: the numbers of plain PyTorch, from any commit, whatever the medium does."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from benchmarks.models import workload
from port_agent.paging.pager import PageError, Pager
from port_agent.training.comparison import MismatchError
from port_agent.training.samples.columns import DataError
from port_agent.training.state.checkpoint import CheckpointError
from port_agent.training.trainer import PastEndError, StepEvent, Trainer, step_message
from port_agent.worker.control import LeftOnRequest
from port_agent.worker.protocol import StateRecovered
from port_planner.base.errors import PortError
from port_planner.exactness.applied_arithmetic import unchanged_arithmetic
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import NUMBERS_FORMAT, PLATEAU_FORMAT, BundleError
from port_planner.ir.costs import Flash
from port_planner.ir.graph import StepGraph
from port_planner.ir.plan import Plan
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.job import TrainingJob
from port_planner.plain_steps import plain_losses
from port_planner.steps_ahead import known_steps
from tests.agent.exactness import random_plan
from tests.agent.jobs_small import BATCH, ROWS, Odd, make_job, next_token, small_bundle, unseen_row, write_job
from tests.agent.training.options import train_options
from tests.agent.training.trained_job import STEPS, paging_trainer, train, trainer
from tests.planner import own_optimizers

pytestmark = pytest.mark.slow
"""Each makes a bundle and trains it."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    return train(tmp_path_factory.mktemp("reference"), plan=0)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "cls",
    [
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Rprop,
        torch.optim.Muon,
        torch.optim.Adafactor,
        torch.optim.ASGD,
        own_optimizers.Lion,
        own_optimizers.OwnAdamW,
    ],
)
def test_a_job_goes_on_from_any_commit_with_the_optimizers_own_numbers(
    cls: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    job = make_job()
    matrices = [p for p in job.model.parameters() if p.dim() == 2 or cls is not torch.optim.Muon]
    optimizer = cls(matrices, lr=0.01)  # type: ignore[call-arg]
    momentum = "betas" in optimizer.defaults
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40, cycle_momentum=momentum)
    write_job(tmp_path / "job.port", replace(job, optimizer=optimizer, scheduler=scheduler), compared=STEPS)
    digests = []
    for name, stops in (("whole", (STEPS,)), ("stopped", (3, 7, STEPS))):
        for stop in stops:
            t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path / name, tmp_path, 1, stop, verify=STEPS))
            t.start()
            t.train(lambda _: None, lambda *_: None)
            digests.append(t.digest())
            t.close()
    assert digests[0] == digests[-1] != digests[1]


def counting_job(accumulate: int) -> TrainingJob:
    """Return a job whose loss counts its calls, computes with the count and keeps what it gave."""
    job = make_job(accumulate=accumulate, eval_data=(), scheduler=None)
    kept: list[torch.Tensor] = []

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append(nn.functional.cross_entropy(model(x), y) * min(1.0, (1 + len(kept)) / 7))
        return kept[-1]

    return replace(job, loss_fn=loss)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_batch_is_computed_with_the_number_that_the_script_has_for_it(accumulate: int, tmp_path: Path) -> None:
    job = counting_job(accumulate)
    expected = list(plain_losses(job, job.data, STEPS))
    bundle = tmp_path / "job.port"
    write_job(
        bundle,
        counting_job(accumulate),
        ahead=lambda n, schedule: known_steps(counting_job(accumulate), n, 60, schedule),
    )
    manifest = Bundle(bundle).manifest
    assert (manifest.format, manifest.known_updates) == (NUMBERS_FORMAT, 30)
    events: list[StepEvent] = []
    for stop in (5, STEPS):
        t = Trainer(Bundle(bundle), train_options(tmp_path / "state", tmp_path, 1, stop))
        t.start()
        t.train(events.append, lambda *_: None)
        t.close()
    assert [event.loss for event in events] == expected


def plateau_job(accumulate: int) -> TrainingJob:
    """Return a job whose rates are halved often: the loss of most epochs is not better by the threshold."""
    job = make_job(accumulate=accumulate, eval_data=(), drop_last=True)
    groups: list[dict[str, Any]] = [
        {"params": [*job.model.parameters()][:2]},
        {"params": [*job.model.parameters()][2:], "lr": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.2)
    rates = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, cooldown=1, threshold=0.5, min_lr=[0.06, 0.0])
    return replace(job, optimizer=optimizer, scheduler=rates, data=[column[: 4 * BATCH] for column in job.data])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rates_are_lowered_at_a_plateau_as_by_the_script_across_a_resume(accumulate: int, tmp_path: Path) -> None:
    job, bundle = plateau_job(accumulate), tmp_path / "job.port"
    per_epoch = len(job.data[0]) // job.batch_size
    steps = 8 * per_epoch
    expected = list(plain_losses(job, job.data, steps))
    lowest, lowered = (group["lr"] for group in job.optimizer.param_groups)
    assert lowest == 0.06 and lowered < 0.1 / 2
    write_job(bundle, plateau_job(accumulate))
    assert Bundle(bundle).manifest.format == PLATEAU_FORMAT
    events: list[StepEvent] = []
    for stop in (per_epoch - 1, 3 * per_epoch, 5 * per_epoch + 1, steps):
        t = Trainer(Bundle(bundle), train_options(tmp_path / "state", tmp_path, 1, stop))
        t.start()
        t.train(events.append, lambda *_: None)
        t.close()
    assert [event.loss for event in events] == expected


def test_rates_that_follow_epochs_need_some(tmp_path: Path) -> None:
    write_job(tmp_path / "job.port", plateau_job(1), compared=0, seeds=(0,))
    options = replace(train_options(tmp_path / "state", tmp_path, 0, 4), weights=tmp_path / "of_the_round.safetensors")
    t = Trainer(Bundle(tmp_path / "job.port"), options)
    with pytest.raises(BundleError, match="follow the losses of its own epochs"):
        t.start()
    t.close()


def test_gradients_are_clipped_in_the_models_order_of_parameters(tmp_path: Path) -> None:
    """Their norms are added in an order, and two groups of an optimizer have another."""
    job = make_job(clip_grad_norm=0.1)
    parts = [*job.model.parameters()]
    groups: list[dict[str, Any]] = [{"params": parts[4:]}, {"params": parts[:4], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups)
    write_job(tmp_path / "job.port", replace(job, optimizer=optimizer, scheduler=None), compared=4, seeds=(0,))
    t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path / "state", tmp_path, 0, 4, verify=4))
    t.start()
    t.train(lambda _: None, lambda *_: None)
    t.close()


def test_a_state_beyond_the_end_is_told_and_left(tmp_path: Path) -> None:
    train(tmp_path, steps=4)
    with pytest.raises(
        PastEndError, match="is already at step 4, but this training ends at step 3; give more --epochs"
    ):
        train(tmp_path, steps=3)
    assert train(tmp_path, steps=4)[0] == []


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_an_lstm_is_plain_pytorchs(kind: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = {"layers": nn.LSTM(6, 12, num_layers=2, batch_first=True, dropout=0.1), "head": nn.Linear(12, 4)}
    model = nn.ModuleDict(parts).to(kind)

    def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, _ = model["layers"](x.to(kind))
        return nn.functional.cross_entropy(model["head"](out[:, -1]).float(), y)

    data = [torch.randn(16, 5, 6), torch.randint(4, (16,))]
    job = TrainingJob(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-2), data, 4)
    write_job(tmp_path / "job.port", job, compared=6)
    for plan in (0, 1):
        t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path / str(plan), tmp_path, plan, 6, verify=6))
        t.start()
        t.train(lambda _: None, lambda *_: None)
        t.close()


def test_more_updates_than_the_optimizers_numbers_are_known_for_are_refused_at_once(tmp_path: Path) -> None:
    job = make_job(scheduler=None)
    optimizer = own_optimizers.OwnAdamW(job.model.parameters())
    write_job(tmp_path / "job.port", replace(job, optimizer=optimizer))
    t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path, tmp_path, 1, 31))
    t.start()
    with pytest.raises(
        PortError, match=r"for 30 updates, but this training takes it to 31: plan the job again with --epochs 6"
    ):
        t.train(lambda _: None, lambda *_: None)
    assert t.step == 0
    t.close()


def test_a_bundle_that_pages_to_two_media_wants_a_directory_on_each(
    reference: tuple[list[float], str], tmp_path: Path
) -> None:
    def split(graph: StepGraph, seed: int) -> Plan:
        plan = random_plan(graph, seed)
        moved = (replace(d, target=int(not graph.storages[d.storage].persistent)) for d in plan.decisions)
        return replace(plan, decisions=tuple(moved))

    disk = Flash("disk", 1e8, 1e8, 1e-4, 1e-9, 1e-9)
    write_job(tmp_path / "two.port", make_job(), plan=split, scratch_targets=(disk,))
    for further in ((tmp_path / "disk",), ()):
        options = train_options(tmp_path / f"state{len(further)}", tmp_path, 1, STEPS, scratch_dirs=further)
        t = Trainer(Bundle(tmp_path / "two.port"), options)
        t.start()
        if further:
            t.train(lambda _: None, lambda *_: None)
            assert t.digest() == reference[1]
            assert all(os.fstat(second.file.fd).st_size > 0 for _, second in t.executors.scratch.values())
        else:
            with pytest.raises(PortError, match="pages to 2 directories, but 1 were given"):
                t.train(lambda _: None, lambda *_: None)
        t.close()


# -- what lies on flash is damaged


def _flip(path: Path, place: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("key", ["parameter/7.weight", "buffer/1.running_mean"])
def test_a_flipped_bit_in_the_weights_starts_no_training(key: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.port"
    copy.write_bytes(small_bundle().read_bytes())
    _flip(copy, Bundle(copy).tensors[key].offset)
    t = Trainer(Bundle(copy), train_options(tmp_path / "state", tmp_path, steps=2))
    with pytest.raises(BundleError, match=f"tensor {key} is damaged"):
        t.start()
    assert t.store.open() is None
    t.close()


def test_a_flipped_bit_in_the_data_ends_training_before_the_step_that_reads_it(tmp_path: Path) -> None:
    copy = tmp_path / "copy.port"
    copy.write_bytes(small_bundle().read_bytes())
    column = Bundle(copy).data["train/0"]
    _flip(copy, column.offset + column.nbytes - 1)
    t = Trainer(Bundle(copy), train_options(tmp_path / "state", tmp_path))
    t.start()
    with pytest.raises(BundleError, match="train/0 is damaged near row"):
        t.train(lambda e: None, lambda *_: None)
    assert 0 <= t.store.open().step < t.batching.per_epoch  # type: ignore[union-attr]
    t.close()


def test_a_label_that_does_not_exist_is_named_with_its_step(tmp_path: Path) -> None:
    """`plan` does not look at every row."""
    job = make_job(eval_data=())
    job.data[1][unseen_row(job)] = 99
    write_job(tmp_path / "job.port", job, compared=0)
    t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path / "state", tmp_path))
    t.start()
    with pytest.raises(DataError, match=r"a label or index that does not exist.*99 is out of bounds") as caught:
        t.train(lambda e: None, lambda *_: None)
    assert f"step {t.step + 1} " in str(caught.value) and caught.value.exit_code == 2
    t.close()


def test_a_state_is_refused_by_a_bundle_with_other_weights_and_back(tmp_path: Path) -> None:
    other = make_job()
    with torch.no_grad():
        next(other.model.parameters())[0, 0, 0, 0] += 1
    write_job(tmp_path / "other.port", other)
    paths = [small_bundle(), tmp_path / "other.port"]
    for i, path in enumerate(paths):
        t = Trainer(Bundle(path), train_options(tmp_path / f"state{i}", tmp_path))
        t.start()
        t.close()
    for i, path in enumerate(paths):
        t = Trainer(Bundle(path), train_options(tmp_path / f"state{1 - i}", tmp_path))
        with pytest.raises(CheckpointError, match="another job"):
            t.start()
        t.close()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_and_weights_are_plain_pytorchs(accumulate: int, tmp_path: Path) -> None:
    job = make_job(accumulate=accumulate, clip_grad_norm=1.0 if accumulate > 1 else None)
    expected = list(plain_losses(job, list(job.data), STEPS))
    t = trainer(tmp_path, accumulate=accumulate, verify=5)
    losses: list[float] = []
    t.start()
    t.train(lambda e: losses.append(e.loss), lambda *_: None)
    assert [x.hex() for x in losses] == [x.hex() for x in expected]
    for name, tensor in job.model.state_dict().items():
        kind = "parameter" if name in dict(job.model.named_parameters()) else "buffer"
        assert torch.equal(t.persistents.tensor(f"{kind}/{name}"), tensor), name
    for name, parameter in job.model.named_parameters():
        for what, tensor in job.optimizer.state[parameter].items():
            assert torch.equal(t.persistents.tensor(f"state/{name}/{what}"), tensor), (name, what)
    out = tmp_path / "w.safetensors"
    t.save_weights(out)
    t.close()
    from safetensors.torch import load_file

    saved = load_file(out)
    assert all(torch.equal(saved[k], v) for k, v in job.model.state_dict().items())


@pytest.mark.sample(3)
@pytest.mark.parametrize("plan", [0, 1, 2])
@pytest.mark.parametrize("remake", [False, True])
def test_all_micro_batches_of_an_update_at_once_are_plain_pytorchs(remake: bool, plan: int, tmp_path: Path) -> None:
    """Dropout draws in the recorded order, running statistics and sums of gradients go on in it,
    clipping sees the same norm.

    The updates with a short batch and the one in which the comparison ends run batch by batch.
    """
    steps, settings = 14, {"accumulate": 3, "clip_grad_norm": 1.0}
    job = make_job(**settings)
    expected = list(plain_losses(job, list(job.data), steps))
    write_job(tmp_path / "job.port", make_job(**settings), remake=remake, seeds=(0, 1, 2))
    t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path / "state", tmp_path, plan, steps, verify=5))
    runs: list[str] = []
    run = t._run
    t._run = lambda name, *rest: runs.append(name) or run(name, *rest)  # type: ignore[method-assign]
    losses: list[float] = []
    t.start()
    t.train(lambda e: losses.append(e.loss), lambda *_: None)
    assert [x.hex() for x in losses] == [x.hex() for x in expected]
    assert runs == ["update", "first", "next", "last@2", "update", "first", "next", "last@2", "first", "next"]
    for name, tensor in job.model.state_dict().items():
        kind = "parameter" if name in dict(job.model.named_parameters()) else "buffer"
        assert torch.equal(t.persistents.tensor(f"{kind}/{name}"), tensor), name
    t.close()


@pytest.mark.long
@pytest.mark.parametrize("room_bytes", [500 << 10, 800 << 10, 1 << 20, 2 << 20])
def test_a_tied_weight_is_trained_to_the_bit_though_other_weights_are_new_by_then(
    room_bytes: int, tmp_path: Path
) -> None:
    """GPT-2 in small, its dropout as it is; a norm that was updated may not make again what the
    tied weight's gradient needs.
    """
    made = workload("gpt2", small=True)
    data = [torch.cat(column) for column in zip(*(made.batch(i) for i in range(4)), strict=True)]
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-3)
    rows = made.batch(0)[0].shape[0]
    job = TrainingJob(made.model, made.loss_fn, optimizer, data, rows, accumulate=4)
    write_job(tmp_path / "job.port", job, remake=True, seeds=(0, 1), compared=4, room_bytes=room_bytes)
    for plan in (0, 1):
        t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path / str(plan), tmp_path, plan, 4, verify=4))
        t.start()
        t.train(lambda _: None, lambda *_: None)
        t.close()


def test_evaluation_is_plain_pytorchs_and_disturbs_nothing(tmp_path: Path, reference: tuple[list[float], str]) -> None:
    job = make_job()
    job.model.eval()
    with torch.no_grad():
        parts = [job.loss_fn(job.model, *(c[i : i + BATCH] for c in job.eval_data)) for i in (0, BATCH)]
    weights = (BATCH, len(job.eval_data[0]) - BATCH)
    loss = sum(p[0].item() * w for p, w in zip(parts, weights, strict=True)) / sum(weights)
    t = trainer(tmp_path)
    t.start()
    evaluation = t.evaluate()
    assert evaluation is not None
    assert evaluation.loss == loss and evaluation.best
    assert evaluation.metric == pytest.approx(
        sum(p[1].item() * w for p, w in zip(parts, weights, strict=True)) / sum(weights)
    )
    t.train(lambda e: (t.evaluate(), None)[1], lambda *_: None)
    assert t.digest() == reference[1]
    t.close()


def test_a_run_that_is_discarded_evaluates_one_batch_of_each_size(tmp_path: Path) -> None:
    job = make_job()
    whole = torch.cat([job.eval_data[0]] * 3), torch.cat([job.eval_data[1]] * 3)
    write_job(tmp_path / "job.port", replace(job, eval_data=whole))
    t = Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path, tmp_path, discard=True))
    t.start()
    ran = list[str]()
    run = t._run
    t._run = lambda name, *rest: ran.append(name) or run(name, *rest)  # type: ignore[method-assign]
    assert t.evaluate() is not None
    t.close()
    assert sorted(ran) == sorted(name for name in t.bundle.graphs if name.startswith("eval"))


@pytest.mark.parametrize("stop_after", [1, 4, 6, 8])
@pytest.mark.parametrize("every", [1, 3])
def test_resuming_gives_the_same_bits(
    stop_after: int, every: int, tmp_path: Path, reference: tuple[list[float], str]
) -> None:
    train(tmp_path, stop_after=stop_after, checkpoint_every=every)
    losses, digest = train(tmp_path, checkpoint_every=every)
    assert digest == reference[1]
    assert losses == reference[0][-len(losses) :]


def test_the_first_step_has_the_arithmetic_of_plain_pytorchs_and_a_later_one_that_of_the_step_before(
    tmp_path: Path,
) -> None:
    """A product that oneDNN refuses switches it off for all convolutions after it, in this process and the next."""
    onednn = torch.backends.mkldnn
    assert trainer(tmp_path).manifest.reference.arithmetic == arithmetic()
    with unchanged_arithmetic():
        onednn.enabled = False  # type: ignore[assignment]  # as something before it in this process left it
        t = trainer(tmp_path, steps=1)
        t.start()
        assert onednn.enabled

        def refused(event: StepEvent) -> None:
            onednn.enabled = False  # type: ignore[assignment]

        t.train(refused, lambda *_: None)
        t.close()
    with unchanged_arithmetic():
        t = trainer(tmp_path, steps=2)
        assert t.start().step == 1 and not onednn.enabled
        t.close()


def test_the_short_last_batch_has_a_graph_of_its_own() -> None:
    names = set(Bundle(small_bundle()).graphs)
    assert names == {"step", f"step@{ROWS % BATCH}", "eval", "eval@2"}


def test_other_numbers_than_the_reference_are_refused(tmp_path: Path) -> None:
    t = trainer(tmp_path, verify=3)
    losses = [*t.manifest.reference.losses]
    losses[1] = (1.0).hex()
    t.manifest = replace(t.manifest, reference=replace(t.manifest.reference, losses=tuple(losses)))
    t.start()
    with pytest.raises(MismatchError, match=r"step 2 .* plain PyTorch gave 1\.0 "):
        t.train(lambda e: None, lambda *_: None)
    t.close()


def test_a_step_tells_what_its_page_thread_measured(tmp_path: Path) -> None:
    """On a slow medium reads and writes take at least their bytes over its speed; plan 1 pages, plan 0 does not."""
    read_speed, write_speed = 4e6, 2e6
    t = trainer(tmp_path, steps=3, read_limit=read_speed, write_limit=write_speed)
    events: list[StepEvent] = []
    t.start()
    t.train(events.append, lambda *_: None)
    t.use_plan(0)
    t.options = replace(t.options, steps=5)
    t.train(events.append, lambda *_: None)
    t.close()
    for done in map(step_message, events[:3]):
        assert done.paged_in_bytes > 0 and done.paged_out_bytes > 0
        assert done.phases_s["page_in"] >= done.paged_in_bytes / read_speed
        assert done.phases_s["page_out"] >= done.paged_out_bytes / write_speed
        assert done.transfer_s == done.phases_s["page_in"] + done.phases_s["page_out"]
        assert done.hidden_s == max(0.0, done.transfer_s - done.phases_s["stall"])
    loading, last = map(step_message, events[3:])
    assert loading.paged_in_bytes > 0, "the other plan wants in RAM what was on flash"
    assert (last.paged_in_bytes, last.phases_s["page_in"], last.phases_s["page_out"]) == (0, 0.0, 0.0)


def test_a_step_does_not_wait_for_its_last_writes(tmp_path: Path, reference: tuple[list[float], str]) -> None:
    """Neither another plan nor an evaluation in between changes a bit, and a commit has waited for all of them."""
    t = paging_trainer(tmp_path)
    left: list[set[str]] = []

    def on_step(event: StepEvent) -> None:
        left.append({k for k, transfer in t.store.pending.items() if not transfer.finished.is_set()})
        if event.step == 2:
            t.evaluate()
            assert not t.store.pending
        t.use_plan(0 if event.step == 4 else 1)

    t.start()
    t.train(on_step, lambda *_: left.append(set(t.store.pending)))
    program = t.programs.of("step")
    cross_step = {program.graph.storages[s].key for s in program.cross_step}
    assert any(left) and all(keys <= cross_step for keys in left)
    assert left[3] == left[7] == left[11] == set(), "a commit waits"
    assert t.digest() == reference[1]
    t.close()


@pytest.mark.parametrize("after", ["step", "evaluation"])
def test_a_write_that_fails_after_its_step_ends_the_run_and_costs_what_is_not_committed(
    after: str, tmp_path: Path, reference: tuple[list[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    t = paging_trainer(tmp_path)
    write_chunk = Pager._write_chunk

    def on_step(event: StepEvent) -> None:
        if event.step == 5:
            assert not all(transfer.finished.is_set() for transfer in t.store.pending.values())
            monkeypatch.setattr(Pager, "_write_chunk", _full)
            if after == "evaluation":
                t.evaluate()

    t.start()
    with pytest.raises(PageError, match="free space"):
        t.train(on_step, lambda *_: None)
    monkeypatch.setattr(Pager, "_write_chunk", write_chunk)
    t.close()
    t = paging_trainer(tmp_path)
    losses: list[float] = []
    t.start()
    t.train(lambda e: losses.append(e.loss), lambda *_: None)
    assert t.digest() == reference[1]
    assert losses == reference[0][3:]
    t.close()


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_a_flipped_bit_while_training(tmp_path: Path, reference: tuple[list[float], str]) -> None:
    t = trainer(tmp_path)
    flipped: list[int] = []

    def on_commit(commit: Any, _: float) -> None:
        if commit.step == 5 and not flipped:
            away = {t.programs.of("step").graph.storages[s].key for s in t.programs.of("step").starts_on_flash}
            slot = t.store.slot(sorted(away)[0])
            flipped.append(slot.offset)
            _flip(t.store.file.path, slot.offset)

    t.start()
    t.train(lambda e: None, on_commit)
    assert flipped
    assert t.digest() == reference[1]
    t.close()


def test_the_result_is_the_whole_state_under_its_own_names(tmp_path: Path) -> None:
    """What was trained, what no step touched, tied weights once: `load_model` takes it strictly."""
    from safetensors.torch import load_model

    torch.manual_seed(0)
    model = Odd()
    data = [torch.arange(16) % 10, (torch.arange(16) + 1) % 10]
    job = TrainingJob(model, next_token, torch.optim.SGD(model.parameters(), lr=0.1), data, 8, seed=1)
    write_job(tmp_path / "odd.port", job)
    t = Trainer(Bundle(tmp_path / "odd.port"), train_options(tmp_path / "state", tmp_path, steps=2))
    try:
        t.start()
        t.train(lambda _: None, lambda *_: None)
        t.save_weights(tmp_path / "w.safetensors")
    finally:
        t.close()
    losses = list(plain_losses(job, data, 2))
    assert len(losses) == 2
    fresh = Odd()
    assert load_model(fresh, tmp_path / "w.safetensors", strict=True) == (set(), [])
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in job.model.state_dict().items())


# -- rot after the last step


def _rotten_slot(t: Trainer) -> Any:
    """Return the slot of a weight that the last commit wrote anew."""
    key = "parameter/7.weight"
    return t.store._slots[key][t.store._committed[key]]


@pytest.mark.parametrize("done", ["digest", "weights"])
def test_rot_after_the_last_step_costs_one_commit(
    done: str, tmp_path: Path, reference: tuple[list[float], str]
) -> None:
    train(tmp_path)
    t = trainer(tmp_path)
    t.start()
    _flip(t.store.file.path, _rotten_slot(t).offset + 77)
    options: list[StateRecovered] = []
    results: list[str] = []

    def finish() -> None:
        if done == "weights":
            t.save_weights(tmp_path / "w.safetensors")
        results.append(t.digest())

    t.train(lambda e: None, lambda *_: None, finish, options.append)
    t.close()
    assert results == [reference[1]]
    (event,) = options
    assert (event.step, event.lost_steps) == (STEPS - 1, 1) and "state.pages" in event.reason


def test_a_block_that_cannot_be_read_is_rot(
    tmp_path: Path, reference: tuple[list[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path)
    t = trainer(tmp_path)
    t.start()
    slot, read = _rotten_slot(t), os.preadv

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        if fd == t.store.file.fd and slot.offset <= offset < slot.offset + slot.nbytes:
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    options: list[StateRecovered] = []
    digests: list[str] = []
    t.train(lambda e: None, lambda *_: None, lambda: digests.append(t.digest()), options.append)
    t.close()
    assert digests == [reference[1]] and [event.lost_steps for event in options] == [1]


def test_without_a_sound_commit_training_begins_anew_and_says_so(
    tmp_path: Path, reference: tuple[list[float], str]
) -> None:
    train(tmp_path, checkpoint_every=STEPS)
    t = trainer(tmp_path)
    t.start()
    for key, slots in t.store._slots.items():
        if t.store.sizes[key]:
            for slot in slots:
                _flip(t.store.file.path, slot.offset)
    options: list[StateRecovered] = []
    digests: list[str] = []
    t.train(lambda e: None, lambda *_: None, lambda: digests.append(t.digest()), options.append)
    t.close()
    assert digests == [reference[1]]
    assert options[-1].step == 0 and sum(event.lost_steps or 0 for event in options) == STEPS


def test_a_medium_that_damages_everything_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(tmp_path)
    t.start()

    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(PageError, match="replace it"):
        t.train(lambda e: None, lambda *_: None)
    t.close()


def test_a_damaged_newest_record_is_told(tmp_path: Path) -> None:
    train(tmp_path)
    t = trainer(tmp_path)
    newest = t.start()
    t.close()
    _flip(t.store._record_path(newest.sequence), 9)
    t = trainer(tmp_path)
    assert t.start().step == STEPS - 1 and "damaged" in t.store.damage
    t.close()


# -- leaving in the middle of a step


def _leave_at(t: Trainer, step: int, instruction: int) -> bool:
    """Train until an instruction of a step and leave there; say whether that step had begun its update."""
    passed = [0]

    def gate() -> None:
        if t.step == step:
            if passed[0] == instruction:
                raise LeftOnRequest
            passed[0] += 1

    t.executors.pass_gate = gate  # type: ignore[method-assign]
    t.executors.interrupted = True
    t.start()
    with pytest.raises(LeftOnRequest):
        t.train(lambda e: None, lambda *_: None)
    assert t._open is not None
    return t._open.executor.changed


def _leave_everywhere(plan: int, every: int, folder: Path, digest: str) -> list[bool]:
    """Leave at each so many-th instruction of the fifth step and resume; say where the update had begun."""
    probe = trainer(folder / "probe", plan=plan)
    count = len(probe.programs.of("step").instructions)
    probe.close()
    updating = []
    for instruction in range(1, count, every):
        t = trainer(folder / str(instruction), plan=plan, checkpoint_every=100)
        updating.append(_leave_at(t, 4, instruction))
        t.commit_finished_steps(60.0, lambda *_: None)
        t.close()
        losses, got = train(folder / str(instruction), plan=plan)
        assert got == digest, instruction
        assert len(losses) == (STEPS if updating[-1] else STEPS - 4), instruction
    return updating


@pytest.mark.parametrize("plan", [0, 1])
def test_leaving_in_the_middle_of_a_step_loses_that_step_alone(
    plan: int, tmp_path: Path, reference: tuple[list[float], str]
) -> None:
    """Running statistics are put back, the order of random numbers too; from the update on the commit before stands."""
    updating = _leave_everywhere(plan, 30, tmp_path, reference[1])
    assert updating == sorted(updating)
    assert updating[:2] == [False, False], "batch norm has changed its statistics by then, which is no update"
    assert updating[-1]


@pytest.mark.long
@pytest.mark.parametrize("plan", [0, 1])
def test_leaving_at_every_instruction(plan: int, tmp_path: Path, reference: tuple[list[float], str]) -> None:
    _leave_everywhere(plan, 1, tmp_path, reference[1])


@pytest.mark.parametrize("where", ["between steps", "in an evaluation", "after a short batch"])
def test_leaving_elsewhere_loses_nothing_that_was_finished(
    where: str, tmp_path: Path, reference: tuple[list[float], str]
) -> None:
    """Nothing of a step that ended is put back: not its statistics, and not those of the short batch before it."""
    t = trainer(tmp_path, checkpoint_every=100)

    def leave() -> None:
        raise LeftOnRequest

    def on_step(event: StepEvent) -> None:
        if event.step == 7 and where != "after a short batch":
            t.executors.gate = leave
            t.interrupt()
            if where == "in an evaluation":
                t.evaluate()
            raise LeftOnRequest

    t.start()
    if where == "after a short batch":
        t.close()
        t = trainer(tmp_path, checkpoint_every=100)
        assert not _leave_at(t, 7, 40)
    else:
        with pytest.raises(LeftOnRequest):
            t.train(on_step, lambda *_: None)
    t.commit_finished_steps(60.0, lambda *_: None)
    t.close()
    losses, digest = train(tmp_path)
    assert digest == reference[1]
    assert len(losses) == STEPS - 7


def test_a_commit_that_would_take_too_long_is_not_begun(tmp_path: Path) -> None:
    t = trainer(tmp_path, plan=0, checkpoint_every=100)
    assert not _leave_at(t, 4, 1)
    commits: list[int] = []
    t.commit_finished_steps(0.0, lambda *_: commits.append(1))
    assert commits == []
    t.commit_finished_steps(60.0, lambda *_: commits.append(1))
    assert commits == [1]
    t.close()


def test_a_step_that_has_begun_its_update_is_finished_if_there_is_time(tmp_path: Path) -> None:
    t = trainer(tmp_path, plan=0, checkpoint_every=100)
    count = len(t.programs.of("step").instructions)
    assert _leave_at(t, 4, count - 8)
    assert t.finishes_first(60.0)
    assert not t.finishes_first(0.0)
    t.close()
