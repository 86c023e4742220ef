"""What is said before a fine-tuning is what it then has: numbers trained, sequences, updates,
bytes kept, where it goes on.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from port_agent.finetuning.accumulation.head_loss import LearnedLoss
from port_agent.finetuning.explain import explain
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions, MicroBatchOrder
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from port_agent.finetuning.training import finetune
from port_agent.packing import Quantization
from tests.agent.finetuning.tiny_model import make_data, make_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> FinetuneOptions:
    folder = tmp_path_factory.mktemp("explain")
    model, data = make_model(folder / "model", hidden_size=128), make_data(folder / "data.jsonl")
    return FinetuneOptions(str(model), (str(data),), str(folder / "out"), sequence_tokens=32, batch=2, held_out=0.2)


def note(text: str) -> None:
    """Hear of what becomes of a base on a grid."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{}, {"targets": ("up_proj", "o_proj"), "lora_rank": 4}, {"lora_rank": None}, {"base": Quantization.NF4}],
)
def test_its_figures_are_those_of_the_model_as_it_is_trained(changed: dict[str, Any], asked: FinetuneOptions) -> None:
    options = replace(asked, **changed)
    found = explain(options, 2000 * MIB)
    model = load_model(options, Task(TaskKind.CAUSAL_LM), note)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert found.trained_parameters == sum(p.numel() for p in trained)
    assert found.trained_bytes == 4 * sum(p.nbytes for p in trained)  # gradients and two moments are of 32 bits too
    assert found.loaded_as == ("float32" if options.lora_rank is None else "bfloat16")
    expected = {"up_proj", "o_proj"} if options.targets else {"q_proj", "v_proj"}
    assert set(found.trained_layers) == (set() if options.lora_rank is None else expected) and not found.merged_bytes
    assert (found.records, found.broken, found.skipped) == (12, 2, 0) and found.longest == 32
    assert (found.read_bytes, found.written_bytes) == (0, 0) and found.resident_frozen_bytes == found.frozen_bytes
    if options.base is not None:
        on_grid = sum(b.nbytes for name, b in model.named_buffers() if name.endswith((".codes", ".scales")))
        assert (found.quantized_layers, found.quantized_bytes, found.is_quantized) == (14, on_grid, False)
        assert explain(options, 2000 * MIB).is_quantized


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, None])
def test_a_mixture_of_experts_is_explained_in_any_floats(rank: int | None, tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", kind="phimoe"), make_data(tmp_path / "data.jsonl")
    asked = FinetuneOptions(str(model), (str(data),), str(tmp_path / "out"), lora_rank=rank, sequence_tokens=32)
    found = explain(asked, 2000 * MIB)
    assert found.saved_bytes > 0 and found.loaded_as == ("bfloat16" if rank else "float32")
    model = load_model(asked, Task(TaskKind.CAUSAL_LM), note)
    experts = [p for name, p in model.named_parameters() if ".experts." in name and not p.requires_grad]
    assert found.merged_bytes == sum(p.nbytes for p in experts)


@pytest.mark.slow
def test_what_is_kept_for_the_backward_pass_is_what_autograd_keeps(asked: FinetuneOptions) -> None:
    found = explain(asked, 2000 * MIB)
    model = load_model(asked, Task(TaskKind.CAUSAL_LM), note)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=torch.zeros((2, 32), dtype=torch.long), use_cache=False).logits
    assert found.logits_bytes == logits.nbytes
    assert found.saved_bytes == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.02)


@pytest.mark.slow
def test_updates_and_sequences_are_those_of_the_training(asked: FinetuneOptions, tmp_path: Path) -> None:
    options = replace(asked, out=str(tmp_path / "out"), epochs=2)
    found = explain(options, 2000 * MIB)
    outcome = finetune(options, lambda update: None, note)
    assert found.updates == outcome.updates and found.sequences == 9 and found.held_out == 2 and not found.done


@pytest.mark.slow
def test_what_does_not_fit_is_read_again_and_written(asked: FinetuneOptions) -> None:
    free_bytes = explain(asked, 2000 * MIB)
    needed = (
        free_bytes.process_bytes
        + free_bytes.working_bytes
        + free_bytes.trained_bytes
        + free_bytes.saved_bytes
        + 2 * free_bytes.logits_bytes
    )
    plenty, tight, too_tight = (explain(asked, needed + extra) for extra in (64 * MIB, -32 * MIB, -128 * MIB))
    assert plenty.written_bytes == 0
    for found in (tight, too_tight):  # the process itself has a little more or less each time
        fewer_rows = 2 * (free_bytes.logits_bytes - found.logits_bytes)
        over = found.process_bytes + needed - fewer_rows - free_bytes.process_bytes - found.ram_bytes
        assert found.written_bytes == over > 0
        assert found.read_bytes == over + 2 * found.frozen_bytes and found.resident_frozen_bytes == 0


@pytest.mark.slow
def test_of_a_model_with_an_encoder_both_sides_are_counted(tmp_path: Path) -> None:
    make_model(tmp_path / "model", kind="t5")
    record = json.dumps({"prompt": "to be or not", "completion": "to be"})
    (tmp_path / "data.jsonl").write_text(f"{record}\n" * 4)
    asked = FinetuneOptions(
        str(tmp_path / "model"),
        (str(tmp_path / "data.jsonl"),),
        str(tmp_path / "out"),
        updates=2,
        held_out=0.5,
        sample="to be",
    )
    found, outcome = explain(asked, 2000 * MIB), finetune(asked, lambda update: None, note)
    assert (
        found.kind == "t5" and found.sequences == found.held_out == 2 and found.longest == 32 and found.saved_bytes > 0
    )
    assert outcome.updates == found.updates == 2 and outcome.loss_after is not None and outcome.sample_after is not None


def test_it_refuses_what_the_training_would(asked: FinetuneOptions) -> None:
    with pytest.raises(FinetuneError, match="no layer w_q; it has"):
        explain(replace(asked, targets=("w_q",)), 2000 * MIB)


@pytest.mark.slow
def test_by_layers_is_explained_with_what_it_reads_and_keeps(asked: FinetuneOptions) -> None:
    ram_bytes = explain(asked, 2000 * MIB).process_bytes + 48 * MIB
    one_by_one, by_layers = (
        explain(replace(asked, accumulate=8, accumulate_by=order), ram_bytes) for order in MicroBatchOrder
    )
    chosen = explain(replace(asked, accumulate=8), ram_bytes)
    assert by_layers.by_layers and chosen.by_layers and not one_by_one.by_layers
    assert "do not fit" in chosen.accumulation_why and by_layers.accumulation_why == "as asked for"
    assert 0 < by_layers.read_bytes < one_by_one.read_bytes / 4
    rows_bytes = asked.batch * 32 * 128 * 2  # of bfloat16
    assert by_layers.saved_bytes == 8 * 3 * rows_bytes + one_by_one.saved_bytes // 2
    assert not explain(replace(asked, accumulate=8), 2000 * MIB).by_layers


@pytest.mark.slow
def test_where_the_head_is_too_much_it_is_explained_on_how_many_rows_it_runs(
    asked: FinetuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = explain(asked, 2000 * MIB)
    assert whole.head_rows == 64 and whole.head_why == "they fit"
    bytes_at_once = LearnedLoss.bytes_at_once
    monkeypatch.setattr(
        LearnedLoss,
        "bytes_at_once",
        lambda self, rows, at_once=None: (4000 * MIB) if (at_once or rows) > 32 else bytes_at_once(self, rows, at_once),
    )
    found = explain(asked, 2000 * MIB)
    assert found.head_rows == 32 and found.logits_bytes == whole.logits_bytes / 2
    assert "the 3.9 GiB of all 64 do not fit into the budget" in found.head_why
    trained = explain(replace(asked, lora_rank=None), 2000 * MIB)
    assert trained.head_rows == 64 and "cannot run on fewer" in trained.head_why
    assert explain(replace(asked, head_rows=16), 2000 * MIB).head_rows == 16
