"""A base on a grid is computed once, found again, made anew where the model changed, and refused
by name where it cannot be.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.quantized.file import quantize_model, quantized_layers
from port_agent.finetuning.quantized.linear import QuantizedLinear, encode_weight
from port_agent.packing import Quantization
from tests.agent.finetuning.tiny_model import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", hidden_size=128)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def quantized(folder: Path, quantization: Quantization = Quantization.NF4) -> tuple[Any, list[str]]:
    model, notes = load(folder), list[str]()
    quantize_model(model, folder, quantization, notes.append)
    return model, notes


@pytest.mark.parametrize("quantization", Quantization)
def test_all_linear_layers_but_the_head_are_on_the_grid(quantization: Quantization, folder: Path) -> None:
    plain, (model, _) = load(folder), quantized(folder, quantization)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(layers) == 14 and not isinstance(model.get_output_embeddings(), QuantizedLinear)
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight.detach()
        assert torch.equal(
            layer.decoded(),
            QuantizedLinear(quantization, *encode_weight(quantization, weight), None, weight.dtype).decoded(),
        )


def test_layers_that_return_more_than_a_product_stay_as_they_are(tmp_path: Path) -> None:
    def layers(kind: str, **settings: Any) -> set[str]:
        config = transformers.AutoConfig.for_model(kind, hidden_size=64, num_hidden_layers=1, vocab_size=99, **settings)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return {name.rpartition(".")[2] for name in quantized_layers(model, Quantization.NF4)}

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    assert layers("phimoe", intermediate_size=64, **heads) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "query_key_value" in layers("falcon", num_attention_heads=2)
    with pytest.raises(FinetuneError, match="has no linear layers"):  # whose bias is added to the rounded product
        layers("falcon", num_attention_heads=2, bias=True)


def test_it_is_computed_once(folder: Path) -> None:
    _, notes = quantized(folder)
    path = folder / ".port-agent" / "nf4.safetensors"
    before = path.stat().st_mtime_ns
    assert "does not exist: 14 linear layers are quantized to nf4, once" in notes[0]
    os.utime(folder / "model.safetensors")  # the same bytes, copied again
    _, notes = quantized(folder)
    assert path.stat().st_mtime_ns == before and len(notes) == 1
    assert "million weights are quantized to nf4" in notes[0]


def test_it_is_made_anew_where_the_model_changed(folder: Path) -> None:
    quantized(folder)
    weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    name = "model.layers.0.mlp.up_proj"
    weights[f"{name}.weight"] *= 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model, notes = quantized(folder)
    assert "was made from a different model.safetensors" in notes[0]
    weight = weights[f"{name}.weight"]
    again = QuantizedLinear(Quantization.NF4, *encode_weight(Quantization.NF4, weight), None, weight.dtype).decoded()
    assert torch.equal(model.get_submodule(name).decoded(), again)


def test_a_damaged_file_is_made_anew(folder: Path) -> None:
    quantized(folder)
    path = folder / ".port-agent" / "nf4.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    _, notes = quantized(folder)
    assert "is damaged: 14 linear layers" in notes[0] and path.read_bytes() == whole


def test_a_weight_that_is_no_number_is_named(folder: Path) -> None:
    model = load(folder)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    with pytest.raises(FinetuneError, match=r"layers\.1\.mlp\.up_proj: a weight is infinite.*download them again"):
        quantize_model(model, folder, Quantization.INT8, lambda note: None)
    assert list((folder / ".port-agent").iterdir()) == []


def test_a_model_without_such_layers_is_refused(folder: Path) -> None:
    half = load(folder).half()
    with pytest.raises(FinetuneError, match="--base nf4 is for linear layers, and this llama has 14, none of bfloat16"):
        quantize_model(half, folder, Quantization.NF4, lambda note: None)


def test_where_it_cannot_be_written_the_remedy_is_said(folder: Path) -> None:
    (folder / ".port-agent").write_text("")
    with pytest.raises(
        FinetuneError, match=r"nf4\.safetensors of .* cannot be written \(.*\); free some space there, or copy"
    ):
        quantized(folder)
