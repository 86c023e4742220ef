"""The recipe learns, stops and goes on with the same bits, and leaves what peft and transformers load."""

import contextlib
import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from port_agent.finetuning.accumulation import head_loss
from port_agent.finetuning.accumulation.choice import Accumulation
from port_agent.finetuning.accumulation.head_loss import LearnedLoss
from port_agent.finetuning.budget_check import BudgetCheck
from port_agent.finetuning.curve import CURVE
from port_agent.finetuning.inputs.libraries import Conv1D
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions, MicroBatchOrder
from port_agent.finetuning.inputs.schedule import RateSchedule
from port_agent.finetuning.quantized.file import quantize_model
from port_agent.finetuning.quantized.linear import QuantizedConv1D, QuantizedLinear
from port_agent.finetuning.steering import TrainingExit
from port_agent.finetuning.text.tokenizing import TokenizerHere
from port_agent.finetuning.trained_model import load_model
from port_agent.finetuning.training import FinetuneOutcome, Update, exit_code, finetune
from port_agent.intercept.budget import budget, flash_written_bytes
from port_agent.packing import Quantization
from port_planner.base.errors import ExitCode
from tests.agent.finetuning.tiny_model import TEXT, make_data, make_model


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> FinetuneOptions:
    folder = tmp_path_factory.mktemp("finetune")
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl")
    return FinetuneOptions(
        str(model), (str(data),), "", sequence_tokens=32, epochs=4, accumulate=2, learning_rate=0.02, held_out=0.2
    )


def run(
    options: FinetuneOptions, report: Callable[[Update], None] = lambda update: None
) -> tuple[FinetuneOutcome, list[str]]:
    notes: list[str] = []
    return finetune(options, report, notes.append), notes


def note_written(totals: list[int]) -> Callable[[Update], None]:
    """Return what appends what was written to flash, after each update."""
    return lambda _: totals.append(flash_written_bytes())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_it_learns_and_leaves_an_adapter_that_peft_loads(
    asked: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []

    def kept(*args: Any) -> Any:
        trained.append(load_model(*args))
        return trained[-1]

    monkeypatch.setattr("port_agent.finetuning.training.load_model", kept)
    options = replace(asked, out=str(tmp_path / "adapter"), sample="to be or")
    updates: list[Update] = []
    outcome, notes = run(options, updates.append)
    assert outcome.loss_before is not None and outcome.loss_after is not None
    assert outcome.loss_after < outcome.loss_before and not outcome.left and exit_code(outcome) == ExitCode.DONE
    assert [u.done for u in updates] == list(range(1, outcome.updates + 1)) and all(u.tokens > 0 for u in updates)
    assert outcome.sample_before != outcome.sample_after
    assert len(notes) == 2 and "2 broken entries are left out, the first: line 13: " in notes[0]
    assert notes[1] == f"perplexity of held-out text before the first update: {math.exp(outcome.loss_before):.1f}"
    base = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    tokens = torch.arange(5)[None]
    frozen = base(input_ids=tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, outcome.out)(input_ids=tokens).logits
    assert not torch.equal(frozen, adapted)
    assert torch.equal(adapted, trained[0](input_ids=tokens).logits)
    assert not (tmp_path / "adapter.state").exists()


@pytest.mark.slow
def test_the_best_weights_are_the_result_and_training_ends_where_they_get_no_better(
    asked: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {0: 3.0, 1: 2.0, 2: 1.5, 3: 1.8, 4: 1.6}
    monkeypatch.setattr("port_agent.finetuning.training._Finetuning.held_out_loss", lambda self: losses[self.done])
    at_two, best, cut, early = (
        replace(asked, out=str(tmp_path / name), updates=4, evaluate_every=1, schedule=RateSchedule.CONSTANT)
        for name in ("two", "best", "cut", "early")
    )
    run(replace(at_two, updates=2, evaluate_every=None))
    outcome, _ = run(best)
    assert (outcome.updates, outcome.best_updates, outcome.loss_after) == (4, 2, 1.5)
    assert {one.updates: one.loss for one in outcome.evaluations} == losses
    name = "adapter_model.safetensors"
    assert files(tmp_path / "best")[name] == files(tmp_path / "two")[name]
    lines = (tmp_path / "best" / CURVE).read_text().splitlines()
    assert lines[:2] == ["updates,loss,held_out_loss", "0,,3.0"] and lines[3].endswith(",1.5") and len(lines) == 6

    losses[0] = 1.0  # never reached again: the result has the best of the trained weights
    worse, notes = run(replace(best, overwrite=True))
    assert (worse.best_updates, worse.loss_after) == (2, 1.5) and "never lower than before" in notes[-1]
    assert files(tmp_path / "best")[name] == files(tmp_path / "two")[name]
    losses[0] = 3.0

    left, _ = run(cut, lambda update: os.kill(os.getpid(), signal.SIGTERM) if update.done == 3 else None)
    assert left.left and run(cut)[0] == replace(outcome, out=cut.out)
    assert files(tmp_path / "cut")[name] == files(tmp_path / "best")[name]
    assert run(replace(early, patience=1))[0].updates == 3
    assert not list(tmp_path.glob("*.state"))


@pytest.mark.slow
def test_an_earlier_adapter_is_trained_further(asked: FinetuneOptions, tmp_path: Path) -> None:
    first = replace(
        asked, out=str(tmp_path / "first"), alpha=8.0, rslora=True, dropout=0.1, weight_decay=0.01, updates=3
    )
    outcome, _ = run(replace(first, held_out=0.2))
    again = replace(first, out=str(tmp_path / "again"), begin_from=first.out)
    further, _ = run(again)
    assert outcome.loss_after == further.loss_before, "it begins where the other ended"
    settings = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert (settings["lora_alpha"], settings["use_rslora"], settings["lora_dropout"]) == (8.0, True, 0.1)
    with pytest.raises(FinetuneError, match="belongs to another model"):
        run(replace(again, out=str(tmp_path / "other"), lora_rank=4))
    other = make_model(tmp_path / "other model", hidden_size=64)
    with pytest.raises(FinetuneError, match="first was trained on other weights than those of"):
        run(replace(again, out=str(tmp_path / "other"), model=str(other)))


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_a_model_that_is_trained_whole_is_written_as_its_files_are(
    wide: bool, asked: FinetuneOptions, tmp_path: Path
) -> None:
    run(replace(asked, out=str(tmp_path / "out"), lora_rank=None, float32_result=wide, updates=1))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32 if wide else torch.bfloat16}


@pytest.mark.slow
def test_a_result_that_cannot_be_written_loses_nothing(
    asked: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, full = replace(asked, out=str(tmp_path / "plain")), replace(asked, out=str(tmp_path / "full"))
    run(plain)

    def refuses(self: TokenizerHere, folder: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(TokenizerHere, "save", refuses)
        with pytest.raises(
            FinetuneError,
            match=r"full cannot be written .*No space left on device.* has all \d+ updates: free some space",
        ):
            run(full)
    assert not Path(full.out).exists()
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
        with pytest.raises(FinetuneError, match=r"checkpoints take .* KiB, and .* has 1\.0 KiB free; free some space"):
            run(replace(plain, out=str(tmp_path / "none")))
    _, notes = run(full)
    assert any(note.startswith("resumes after") for note in notes)
    assert files(Path(full.out))["adapter_model.safetensors"] == files(Path(plain.out))["adapter_model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "plain"], "nothing is left beside the results"
    with pytest.raises(FinetuneError, match="plain exists already; give another --out, or --overwrite"):
        run(plain)
    run(replace(plain, overwrite=True))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, None])
def test_stopped_and_gone_on_it_is_the_same_to_the_bit(
    rank: int | None, asked: FinetuneOptions, tmp_path: Path
) -> None:
    options = replace(asked, out=str(tmp_path / "whole"), lora_rank=rank, learning_rate=1e-3, updates=8)
    losses: list[float] = []
    run(options, lambda update: losses.append(update.loss))
    parted = replace(options, out=str(tmp_path / "parted"))
    mine: list[float] = []
    stops = [2, 5]

    def report(update: Update) -> None:
        mine.append(update.loss)
        if update.done in stops:
            os.kill(os.getpid(), signal.SIGTERM)

    for stop in stops:
        outcome, _ = run(parted, report)
        assert outcome.left and outcome.updates == stop and exit_code(outcome) == ExitCode.LEFT
    outcome, notes = run(parted, report)
    assert not outcome.left and any("resumes after 5 of" in note for note in notes)
    assert mine == losses
    whole, again = files(tmp_path / "whole"), files(tmp_path / "parted")
    assert whole.keys() == again.keys()
    assert all(whole[name] == again[name] for name in whole if name.endswith(".safetensors"))


@pytest.mark.slow
def test_an_evaluation_that_is_cut_again_and_again_goes_on_where_it_was(
    asked: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(asked, out=str(tmp_path / "whole"), learning_rate=1e-3, updates=2)
    evaluated, cut_every = 0, 0

    class Counted(LearnedLoss):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal evaluated
            loss = super().__call__(*args, **kwargs)
            if not torch.is_grad_enabled():
                evaluated += 1
                if cut_every and evaluated % cut_every == 0:
                    raise TrainingExit
            return loss

    monkeypatch.setattr("port_agent.finetuning.training.LearnedLoss", Counted)
    whole, _ = run(options)
    texts, evaluated, cut_every = evaluated // 2, 0, 2
    parted, windows = None, 0
    while parted is None and windows < 4 * texts:
        windows += 1
        with contextlib.suppress(TrainingExit):
            parted, _ = run(replace(options, out=str(tmp_path / "parted")))
    assert texts > 1 and parted is not None and windows > texts
    assert (parted.loss_before, parted.loss_after) == (whole.loss_before, whole.loss_after)
    assert not (tmp_path / "parted.state").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, None])
def test_by_layers_it_is_the_same_to_the_bit_and_goes_on_where_one_by_one_stopped(
    rank: int | None, asked: FinetuneOptions, tmp_path: Path
) -> None:
    options = replace(asked, lora_rank=rank, learning_rate=1e-3, updates=4, accumulate=3)
    losses: dict[MicroBatchOrder, list[float]] = {}
    for order in MicroBatchOrder:
        mine = losses.setdefault(order, [])
        run(
            replace(options, out=str(tmp_path / order), accumulate_by=order),
            lambda update, mine=mine: mine.append(update.loss),  # type: ignore[misc]
        )
    batches, layers = (files(tmp_path / order) for order in MicroBatchOrder)
    assert losses[MicroBatchOrder.BATCHES] == losses[MicroBatchOrder.LAYERS]
    weights = [name for name in batches if name.endswith(".safetensors")]
    assert weights and all(batches[name] == layers[name] for name in weights)
    parted = replace(options, out=str(tmp_path / "parted"))
    outcome, _ = run(
        replace(parted, accumulate_by=MicroBatchOrder.BATCHES),
        lambda update: os.kill(os.getpid(), signal.SIGTERM) if update.done == 2 else None,
    )
    assert outcome.left
    _, notes = run(replace(parted, accumulate_by=MicroBatchOrder.LAYERS))
    assert any("resumes after 2 of" in note for note in notes)
    assert any("3 batches of an update run layer by layer: as asked for" in note for note in notes)
    again = files(tmp_path / "parted")
    assert all(batches[name] == again[name] for name in weights)


@pytest.mark.slow
def test_where_layers_turn_out_not_to_stand_alone_the_batches_run_one_by_one(
    asked: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(asked, updates=3, accumulate=2)

    def hooked(*args: Any) -> Any:
        model = load_model(*args)
        model.get_base_model().model.layers[0].register_forward_hook(
            lambda _, __, output: output + torch.rand(()) if torch.is_grad_enabled() else output
        )
        return model

    monkeypatch.setattr("port_agent.finetuning.training.load_model", hooked)
    run(replace(options, out=str(tmp_path / "plain"), accumulate_by=MicroBatchOrder.BATCHES))
    with pytest.raises(FinetuneError, match="cannot run layer by layer: it draws random numbers"):
        run(replace(options, out=str(tmp_path / "refused"), accumulate_by=MicroBatchOrder.LAYERS))
    monkeypatch.setattr("port_agent.finetuning.training.accumulation_of", lambda *_: Accumulation(True, "no room"))
    _, notes = run(replace(options, out=str(tmp_path / "chosen")))
    assert any("run one at a time: it draws random numbers" in note for note in notes)
    name = "adapter_model.safetensors"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "chosen" / name).read_bytes()


@pytest.mark.process
def test_on_flash_that_wears_out_layers_are_computed_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = make_model(tmp_path / "model", 128), make_data(tmp_path / "data.jsonl")
    options = FinetuneOptions(str(model), (str(data),), "", sequence_tokens=64, updates=12, held_out=0.0)
    monkeypatch.setattr("port_agent.finetuning.accumulation.choice._SPARED_BYTES", 64 << 10)
    written: dict[MicroBatchOrder | None, list[int]] = {None: [0], MicroBatchOrder.BATCHES: [0]}
    noted: list[str] = []
    for order, totals in written.items():
        asked = replace(options, out=str(tmp_path / str(order)), accumulate_by=order)
        with budget(tensors="512K", page_dir=tmp_path, wear_joules=1e-6).resizing():
            noted += run(asked, note_written(totals))[1]
    assert any("the batch of an update runs" in note and "to flash" in note for note in noted), noted
    spared, plain = (totals[-1] - totals[1] for totals in written.values())
    assert spared < plain / 2  # what is read early may now and then have something leave, as threads happen to run
    results = [(tmp_path / str(order) / "adapter_model.safetensors").read_bytes() for order in written]
    assert results[0] == results[1]


@pytest.mark.slow
def test_magnitudes_are_trained_in_a_budget_layer_by_layer_and_told_as_they_are_without(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", 128), make_data(tmp_path / "data.jsonl")
    options = FinetuneOptions(
        str(model), (str(data),), "", sequence_tokens=64, updates=3, accumulate=2, dora=True, learning_rate=0.01
    )
    with pytest.raises(FinetuneError, match="cannot run layer by layer: its packed texts are masked from each other"):
        run(replace(options, out=str(tmp_path / "refused"), borders=True, accumulate_by=MicroBatchOrder.LAYERS))
    plain = replace(options, out=str(tmp_path / "plain"), events=str(tmp_path / "runs"))
    bounded = replace(options, out=str(tmp_path / "bounded"), accumulate_by=MicroBatchOrder.LAYERS)
    run(plain)
    with budget(tensors="640K", page_dir=tmp_path).resizing():
        run(bounded)
    first, second = (load_file(Path(one.out) / "adapter_model.safetensors") for one in (plain, bounded))
    assert any(name.endswith(".lora_magnitude_vector") for name in first)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    (events,) = (tmp_path / "runs").iterdir()
    assert events.read_bytes().count(b"held-out loss") == 1 and events.read_bytes().count(b"\x04loss") == 3
    further = replace(options, out=str(tmp_path / "further"), begin_from=plain.out, updates=1)
    run(further)
    assert files(tmp_path / "further")["adapter_config.json"] == files(tmp_path / "plain")["adapter_config.json"]


@pytest.mark.slow
def test_pairs_of_answers_are_learned_in_a_budget_as_without(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", 128), tmp_path / "pairs.jsonl"
    records = [{"prompt": TEXT[:length], "chosen": "not to be", "rejected": "the question"} for length in range(9, 19)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = FinetuneOptions(
        str(model), (str(data),), "", batch=2, epochs=3, dpo=0.1, learning_rate=0.01, held_out=0.2
    )
    plain, bounded = (replace(options, out=str(tmp_path / name)) for name in ("plain", "bounded"))
    outcome, notes = run(plain)
    assert outcome.loss_before == pytest.approx(math.log(2)) and outcome.loss_after is not None
    assert (
        outcome.loss_after < math.log(2)
        and not outcome.is_of_tokens
        and not any("perplexity" in note for note in notes)
    )
    with budget(tensors="640K", page_dir=tmp_path).resizing():
        run(bounded)
    first, second = ((Path(one.out) / "adapter_model.safetensors").read_bytes() for one in (plain, bounded))
    assert first == second
    _, notes = run(replace(options, out=str(tmp_path / "further"), begin_from=plain.out, updates=1))
    assert any(
        "--dpo compares with the model without adapters" in note and "port-agent merge" in note for note in notes
    )
    with pytest.raises(FinetuneError, match="--dpo compares answers with those of the model without its adapters"):
        run(replace(options, out=str(tmp_path / "full"), lora_rank=None))
    with pytest.raises(FinetuneError, match=r"runs cannot be written to .*; give another --tensorboard"):
        data.with_name("runs").touch()
        run(replace(options, out=str(tmp_path / "told"), events=str(tmp_path / "runs")))


@pytest.mark.slow
def test_odds_of_answers_are_learned_by_a_whole_model_in_a_budget_as_without(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), tmp_path / "pairs.jsonl"
    records = [{"prompt": TEXT[:length], "chosen": "not to be", "rejected": "the question"} for length in range(9, 14)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = FinetuneOptions(
        str(model), (str(data),), "", lora_rank=None, batch=2, epochs=2, orpo=0.5, learning_rate=0.01, held_out=0.2
    )
    plain, bounded = (replace(options, out=str(tmp_path / name)) for name in ("plain", "bounded"))
    outcome, notes = run(plain)
    assert outcome.loss_before is not None and outcome.loss_after is not None
    assert outcome.loss_after < outcome.loss_before and not outcome.is_of_tokens
    assert not any("perplexity" in note for note in notes)
    with budget(tensors="640K", page_dir=tmp_path).resizing():
        run(bounded)
    first, second = (files(Path(one.out))["model.safetensors"] for one in (plain, bounded))
    assert first == second
    with pytest.raises(FinetuneError, match="--orpo compares answers on all rows at once and without dropout"):
        run(replace(options, out=str(tmp_path / "dropped"), lora_rank=8, dropout=0.1))


@pytest.mark.slow
def test_under_autocast_a_budget_changes_no_bit(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", 128), make_data(tmp_path / "data.jsonl")
    options = FinetuneOptions(str(model), (str(data),), "", sequence_tokens=64, updates=3, held_out=0.0, autocast=True)
    plain, bounded, uncast = (replace(options, out=str(tmp_path / name)) for name in ("plain", "bounded", "uncast"))
    run(plain)
    with budget(tensors="640K", page_dir=tmp_path).resizing() as bound:
        run(bounded)
    assert bound.report.written_bytes > 0
    run(replace(uncast, autocast=False))
    first, second, third = (
        (Path(one.out) / "adapter_model.safetensors").read_bytes() for one in (plain, bounded, uncast)
    )
    assert first == second != third


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("llama", Quantization.NF4),
        pytest.param("llama", Quantization.INT8, marks=pytest.mark.long),
        ("gpt2", Quantization.NF4),
    ],
)
def test_a_base_on_a_grid_trains_as_plain_layers_over_its_weights(
    kind: str, grid: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make_model(tmp_path / "model", 128, kind), make_data(tmp_path / "data.jsonl")
    options = FinetuneOptions(
        str(model),
        (str(data),),
        str(tmp_path / "grid"),
        base=grid,
        sequence_tokens=32,
        updates=10,
        held_out=0.0,
        learning_rate=0.02,
    )
    losses: dict[str, list[float]] = {"grid": [], "plain": []}
    _, notes = run(options, lambda update: losses["grid"].append(update.loss))
    assert any(f"quantized to {grid.value}" in note for note in notes)

    def put_plain_layers(module: Any, folder: Path, grid: Quantization, note: Callable[[str], None]) -> None:
        quantize_model(module, folder, grid, note)
        for name, layer in [
            (n, m) for n, m in module.named_modules() if isinstance(m, QuantizedLinear | QuantizedConv1D)
        ]:
            with torch.device("meta"):  # draws no number
                plain: Any = (
                    Conv1D(layer.nf, layer.nx)
                    if isinstance(layer, QuantizedConv1D)
                    else torch.nn.Linear(layer.in_features, layer.out_features)
                )
            plain.weight, plain.bias = torch.nn.Parameter(layer.decoded()), layer.bias
            module.set_submodule(name, plain)

    monkeypatch.setattr("port_agent.finetuning.trained_model.quantize_model", put_plain_layers)
    run(replace(options, out=str(tmp_path / "plain")), lambda update: losses["plain"].append(update.loss))
    assert losses["grid"] == losses["plain"] and len(losses["grid"]) == 10
    weights = "adapter_model.safetensors"
    assert (tmp_path / "grid" / weights).read_bytes() == (tmp_path / "plain" / weights).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_weights_that_change_in_their_file_meanwhile_are_refused_by_name(
    stops: bool, asked: FinetuneOptions, tmp_path: Path
) -> None:
    model = shutil.copytree(asked.model, tmp_path / "model")
    options = replace(asked, model=str(model), out=str(tmp_path / "out"), updates=2, held_out=0.0)

    def write(update: Update) -> None:
        path = model / "model.safetensors"
        with path.open("r+b") as weights:
            weights.seek(path.stat().st_size // 2)
            weights.write(bytes(1 << 14))
        if stops:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(FinetuneError, match=r"model.safetensors has changed since the fine-tuning of .* began"):
        run(options, write)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.state").exists()


def test_a_tokenizer_of_another_model_is_refused_before_the_first_update(
    asked: FinetuneOptions, tmp_path: Path
) -> None:
    small = make_model(tmp_path / "small", vocabulary=40)
    shutil.copyfile(Path(asked.model) / "tokenizer.json", small / "tokenizer.json")
    with pytest.raises(FinetuneError, match="but the model knows tokens 0 to 39: they do not belong together"):
        run(replace(asked, model=str(small), out=str(tmp_path / "out")))


def test_a_loss_that_is_no_number_stops_it(asked: FinetuneOptions, tmp_path: Path) -> None:
    options = replace(asked, out=str(tmp_path / "out"), learning_rate=1e30, lora_rank=None)
    with pytest.raises(FinetuneError, match=r"the loss of update \d+ is nan.*lower --lr"):
        run(options)


@pytest.mark.slow
def test_updates_are_counted_from_the_data_or_as_asked(asked: FinetuneOptions, tmp_path: Path) -> None:
    outcome, _ = run(replace(asked, out=str(tmp_path / "out"), updates=3, held_out=0.0))
    assert outcome.updates == 3 and outcome.loss_before is None and outcome.loss_after is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "said"),
    [
        (4, "1 of 5 sequences are not learned, because they do not fill an update of 4"),
        (7, "some are learned more than once"),
        (5, None),
    ],
)
def test_sequences_that_do_not_fill_an_update_are_told(
    accumulate: int, said: str | None, asked: FinetuneOptions, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps({"prompt": "to be", "completion": " or not"}) + "\n") * 5)
    options = replace(
        asked, data=(str(data),), out=str(tmp_path / "out"), held_out=0.0, epochs=1, accumulate=accumulate
    )
    found = [text for text in run(options)[1] if "learned" in text and "update" in text]
    assert found == [] if said is None else said in found[0]


@pytest.mark.slow
def test_numbers_of_rows_that_are_compared_before_are_those_that_come(
    asked: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[set[int]] = []
    came: set[int] = set()
    chosen = head_loss.chosen_log_probabilities
    monkeypatch.setattr(BudgetCheck, "check", lambda self, loss, trained, tokens, rows, met: told.append(met()))
    monkeypatch.setattr(
        head_loss,
        "chosen_log_probabilities",
        lambda logits, *given: came.add(logits.shape[1]) or chosen(logits, *given),
    )
    records = [{"prompt": TEXT * times, "completion": TEXT[: 10 * times]} for times in (1, 2, 3, 4, 5)] * 2
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for batch in (1, 2):
        options = replace(
            asked, data=(str(data),), out=str(tmp_path / str(batch)), sequence_tokens=256, batch=batch, epochs=1
        )
        came.clear()
        run(options)
        assert told[-1] == came and len(came) > 1
