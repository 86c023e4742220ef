"""A quantized directory becomes a model directory of floats that transformers loads, and
that trains on its own codes.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from port_agent.finetuning.decoding.directory import DecodedType, DecodeOutcome, decode_model
from port_agent.finetuning.inputs.model_files import check_model_files
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.quantized.linear import QuantizedLinear
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from port_agent.packing.quantized import Quantization
from tests.agent.finetuning.decoding.coded_models import GROUP, Packed, awq_layer, gptq_layer, make_coded, nf4_layer

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
KINDS: dict[str, tuple[Callable[[int, int], Packed], dict[str, Any]]] = {
    "gptq": (gptq_layer, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "awq": (awq_layer, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "nf4": (functools.partial(nf4_layer, nested=True), NF4),
}


def decode(folder: Path, out: Path, kind: DecodedType = DecodedType.F32) -> DecodeOutcome:
    shares: list[float] = []
    outcome = decode_model(folder, out, kind, None, shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0
    return outcome


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_exact_numbers(kind: str, tmp_path: Path) -> None:
    folder, weights = make_coded(tmp_path / "coded", *KINDS[kind])
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "modeling_own.py").write_text("")
    outcome = decode(folder, tmp_path / "out")
    assert (outcome.decoded, outcome.weights, outcome.rounded) == (8, len(weights), 0)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in folder.iterdir() if path.name not in ("model.safetensors.index.json", "modeling_own.py")
    }
    check_model_files(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    mine = dict(model.named_parameters())
    assert model.dtype is torch.float32 and all(torch.equal(mine[name], weights[name].float()) for name in weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("to be")["input_ids"]


def test_codes_of_bitsandbytes_are_those_that_base_nf4_trains(tmp_path: Path) -> None:
    folder, weights = make_coded(tmp_path / "coded", *KINDS["nf4"])
    decode(folder, tmp_path / "out")
    options = FinetuneOptions(str(tmp_path / "out"), ("",), str(tmp_path / "adapter"), base=Quantization.NF4)
    trained = load_model(options, Task(TaskKind.CAUSAL_LM), lambda text: None).get_base_model()
    layers = {name: module for name, module in trained.named_modules() if isinstance(module, QuantizedLinear)}
    names = [name for name in weights if "self_attn" in name]
    for name in names:
        found = next(m for n, m in layers.items() if n.replace(".base_layer", "") == name.removesuffix(".weight"))
        assert torch.equal(found.decoded(), weights[name]), name


def test_rounded_numbers_are_counted(tmp_path: Path) -> None:
    folder, weights = make_coded(tmp_path / "coded", *KINDS["gptq"])
    outcome = decode(folder, tmp_path / "out", DecodedType.BF16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], weights[name].to(torch.bfloat16)) for name in weights)
    assert outcome.rounded == sum(int((w.to(torch.bfloat16).float() != w).sum()) for w in weights.values()) > 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_settings_of_autogptq_are_read_beside_the_configuration(tmp_path: Path) -> None:
    folder, weights = make_coded(tmp_path / "coded", *KINDS["gptq"])
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FinetuneError, match="has no quantization_config: its weights are floats"):
        decode(folder, tmp_path / "out")
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    decode(folder, tmp_path / "out")
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.self_attn.v_proj.weight"],
        weights["model.layers.1.self_attn.v_proj.weight"],
    )
    assert not (tmp_path / "out" / "quantize_config.json").exists()


def test_a_kind_whose_codes_are_in_another_order_is_refused(tmp_path: Path) -> None:
    folder, _ = make_coded(tmp_path / "coded", *KINDS["gptq"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(FinetuneError, match="is a gpt2, whose codes are in another order than its floats"):
        decode(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("other.codes", torch.zeros(3, dtype=torch.int32), r"holds other\.codes as I32, which is not part of a weight"),
        (
            "model.norm.weight",
            torch.full((64,), torch.nan),
            r"model\.norm\.weight has nan, which torch\.float32 cannot",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(name: str, changed: torch.Tensor, said: str, tmp_path: Path) -> None:
    folder, _ = make_coded(tmp_path / "coded", *KINDS["gptq"])
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: changed}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FinetuneError, match=said):
        decode_model(folder, tmp_path / "out", DecodedType.F32, None, lambda share: None)
    assert [path.name for path in tmp_path.iterdir()] == ["coded"]
