"""What of a model is trained: adapters in 32 bits over frozen weights, or everything."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from port_agent.finetuning import trained_model
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import check_takes, load_model
from port_agent.intercept.residency.storages import SMALLEST_MAPPING_BYTES
from tests.agent.finetuning.tiny_model import make_model

CAUSAL = Task(TaskKind.CAUSAL_LM)


def report(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_adapters_are_trained_in_32_bits_and_the_rest_is_frozen(folder: Path) -> None:
    model = load_model(FinetuneOptions(str(folder), ("",), "", lora_rank=2), CAUSAL, report)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == {"q_proj", "v_proj"}
    assert all(p.dtype == torch.bfloat16 for p in model.parameters() if not p.requires_grad)


@pytest.mark.slow
def test_targets_are_those_asked_for(folder: Path) -> None:
    model = load_model(FinetuneOptions(str(folder), ("",), "", targets=("up_proj",)), CAUSAL, report)
    assert {n.split(".lora_")[0].rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad} == {
        "up_proj"
    }
    with pytest.raises(FinetuneError, match="no layer w_q; it has down_proj, gate_proj, k_proj, lm_head"):
        load_model(FinetuneOptions(str(folder), ("",), "", targets=("up_proj", "w_q")), CAUSAL, report)


def test_targets_are_taken_as_peft_stores_them_for_a_small_model(folder: Path) -> None:
    options = FinetuneOptions(str(folder), ("",), "", targets=("all-linear",))
    model = load_model(options, CAUSAL, report)
    stored = tuple(sorted(model.peft_config["default"].target_modules))
    assert any("." in name for name in stored)
    again = load_model(replace(options, targets=stored), CAUSAL, report)
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_all_weights_are_trained_in_32_bits(folder: Path) -> None:
    model = load_model(FinetuneOptions(str(folder), ("",), "", lora_rank=None), CAUSAL, report)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


def changed(folder: Path, target: Path, **settings: int) -> FinetuneOptions:
    """Return what trains a copy of a model whose configuration says something else."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **settings}))
    return FinetuneOptions(str(target), ("",), "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"hidden_size": 64},
            r"lm_head.weight is \[\d+, 32\] in the files of .* and \[\d+, 64\] as config.json describes it",
        ),
        (
            {"num_hidden_layers": 3},
            r"lacks 9 weights of the model that config.json describes, model.layers.2.input_layernorm.weight",
        ),
    ],
)
def test_files_of_another_model_than_is_described_are_named(
    settings: dict[str, int], said: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(FinetuneError, match=said):
        load_model(changed(folder, tmp_path / "model", **settings), CAUSAL, report)


def without(folder: Path, name: str) -> None:
    """Take a weight out of a directory's file."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_a_weight_that_no_file_has_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    without(tmp_path / "model", name)
    with pytest.raises(FinetuneError, match=f"lacks 1 weights of the model that config.json describes, {name} first"):
        load_model(FinetuneOptions(str(tmp_path / "model"), ("",), ""), CAUSAL, report)


def test_weights_that_the_model_does_not_take_are_named(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    load_model(changed(folder, tmp_path / "model", num_hidden_layers=1), CAUSAL, said.append)
    assert said == [
        "9 weights in the files belong to no layer that config.json describes and are not used, "
        "model.layers.1.input_layernorm.weight first"
    ]


def test_an_adapter_of_a_head_that_is_the_embeddings_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    tied = changed(folder, tmp_path / "model", tie_word_embeddings=True)
    without(tmp_path / "model", "lm_head.weight")
    with pytest.raises(FinetuneError, match="--targets names lm_head, which shares its weight with the embeddings"):
        load_model(replace(tied, targets=("lm_head",)), CAUSAL, report)


@pytest.mark.slow
def test_layers_that_return_more_than_a_product_get_no_adapters(tmp_path: Path) -> None:
    model = load_model(FinetuneOptions(str(make_model(tmp_path / "phimoe", kind="phimoe")), ("",), ""), CAUSAL, report)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_" in name}
    assert {"q_proj", "v_proj"} <= adapted and "router" not in adapted and "lm_head" not in adapted
    falcon = FinetuneOptions(str(make_model(tmp_path / "falcon", kind="falcon")), ("",), "")
    assert any("query_key_value.lora_A" in name for name, _ in load_model(falcon, CAUSAL, report).named_parameters())
    mamba = FinetuneOptions(str(make_model(tmp_path / "mamba", kind="mamba")), ("",), "")
    assert not any("out_proj.lora" in name for name, _ in load_model(mamba, CAUSAL, report).named_parameters())
    with pytest.raises(FinetuneError, match=r"peft rejects these layers: .*; give other --targets"):
        load_model(replace(mamba, targets=("out_proj",)), CAUSAL, report)


@pytest.mark.slow
def test_what_a_model_has_no_places_or_no_rows_for_is_refused(tmp_path: Path) -> None:
    with_places, without = (
        load_model(FinetuneOptions(str(make_model(tmp_path / kind, kind=kind)), ("",), ""), CAUSAL, report)
        for kind in ("gpt2", "llama")
    )
    check_takes(with_places, 128, 20)
    check_takes(without, 129, 20)  # its places are angles
    with pytest.raises(FinetuneError, match="--seq-len 129 is more than the 128 tokens that this model takes"):
        check_takes(with_places, 129, 20)
    rows = without.get_input_embeddings().weight.shape[0]
    with pytest.raises(FinetuneError, match=rf"token {rows} from the text, but the model knows tokens 0 to {rows - 1}"):
        check_takes(without, 16, rows)
    without.config.output_router_logits = True
    with pytest.raises(FinetuneError, match="auxiliary loss of its router"):
        check_takes(without, 16, 20)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_adapters(folder: Path) -> None:
    first, second = (load_model(FinetuneOptions(str(folder), ("",), "", seed=3), CAUSAL, report) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.slow
def test_a_head_for_labels_is_made_by_the_seed_and_trained(tmp_path: Path) -> None:
    notes: list[str] = []
    wanted = FinetuneOptions(str(make_model(tmp_path, kind="distilbert")), ("",), "", seed=3)
    task = Task(TaskKind.CLASSIFICATION, labels=("no", "yes"))
    first, second = (load_model(wanted, task, notes.append) for _ in range(2))
    trained = {name for name, p in first.named_parameters() if p.requires_grad and "lora_" not in name}
    heads = {name.split(".modules_to_save")[0].removeprefix("base_model.model.") for name in trained}
    assert heads == {"classifier", "pre_classifier"} and "classifier.bias, classifier.weight, pre_" in notes[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.config.id2label == {0: "no", 1: "yes"} and first.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere files' pages are not followed")
def test_small_weights_are_no_longer_in_their_files_and_large_ones_are(tmp_path: Path) -> None:
    folder = make_model(tmp_path, hidden_size=256)
    model = load_model(FinetuneOptions(str(folder), ("",), ""), CAUSAL, report)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        found = model.get_parameter(f"base_model.model.{name}" if "_proj" not in name else _base_layer(model, name))
        assert found.untyped_storage().resizable() == (tensor.nbytes < SMALLEST_MAPPING_BYTES), name
        assert torch.equal(found, tensor)
    assert {tensor.nbytes < SMALLEST_MAPPING_BYTES for tensor in stored.values()} == {True, False}


def _base_layer(model: Any, name: str) -> str:
    layer = f"base_model.model.{name.removesuffix('.weight')}"
    return f"{layer}.base_layer.weight" if hasattr(model.get_submodule(layer), "base_layer") else f"{layer}.weight"


class _Sizes(TorchDispatchMode):
    """The bytes of the largest tensor with memory that an operator returned."""

    largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.is_meta:
            self.largest_bytes = max(self.largest_bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.slow
def test_a_model_of_buffers_alone_is_made_without_memory_for_its_weights(folder: Path) -> None:
    """A head in 32 bits may be more than the budget has."""
    model = load_model(FinetuneOptions(str(folder), ("",), "", lora_rank=2), CAUSAL, report)
    base, state = model.get_base_model(), torch.get_rng_state()
    head_bytes = base.get_output_embeddings().weight.numel() * torch.float32.itemsize
    with _Sizes() as sizes:
        made = trained_model._without_weights(base)
    assert sizes.largest_bytes < head_bytes / 8 and all(p.is_meta for p in made.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert [tuple(b.shape) for b in made.buffers()] == [tuple(b.shape) for b in base.buffers()]


def test_buffers_that_are_filled_after_they_were_created_are_made_with_memory() -> None:
    class Model(torch.nn.Module):
        config: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.empty(3).fill_(0.5))
            self.weight = torch.nn.Parameter(torch.empty(4))

        @classmethod
        def _from_config(cls, config: Any, dtype: torch.dtype) -> "Model":
            return cls()

    made = trained_model._without_weights(Model())
    assert made.weight.is_meta and made.angles.tolist() == [0.5] * 3
