"""Models whose every setting has a place in GGUF are written, and others refused by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from port_agent.finetuning.export.shape import shape_of
from port_agent.finetuning.inputs.options import FinetuneError
from tests.agent.finetuning.export.exported_models import make_exported

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def config(folder: Path, kind: str, **settings: Any) -> Path:
    """Write a configuration alone."""
    AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("gpt2", {}, "is a 'gpt2', and export writes LlamaForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM; convert it with"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "is a 'LlamaForSequenceClassification', and"),
        ("llama", {"hidden_act": "gelu"}, "has 'hidden_act gelu', which export does not write"),
        ("llama", {"mlp_bias": True}, "has 'mlp_bias'"),
        ("qwen3", {"attention_bias": True}, "has 'attention_bias'"),
        ("qwen2", {"use_sliding_window": True}, "has 'use_sliding_window'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "has 'rope_type dynamic'"),
    ],
)  # fmt: skip
def test_what_has_no_place_in_gguf_is_refused_by_name(
    kind: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(FinetuneError, match=said):
        shape_of(config(tmp_path, kind, **settings))


def test_weights_that_are_missing_or_strange_are_named(tmp_path: Path) -> None:
    shape = shape_of(config(tmp_path, "llama", num_hidden_layers=1))
    names = set(shape.names())
    shape.check_names({*names, "model.layers.0.self_attn.rotary_emb.inv_freq"})
    with pytest.raises(FinetuneError, match=r"1 of 12 weights are not stored, 'lm_head\.weight' first"):
        shape.check_names(names - {"lm_head.weight"})
    with pytest.raises(FinetuneError, match=r"GGUF's llama has no place for 1 weights, 'model\.extra\.weight' first"):
        shape.check_names({*names, "model.extra.weight"})


def test_frequencies_of_llama_3_1_are_divided_as_it_says(tmp_path: Path) -> None:
    found = shape_of(config(tmp_path, "llama", head_dim=128, rope_parameters=LLAMA3)).rope_factors()
    assert found is not None and found.dtype == torch.float32
    for place, factor in enumerate(found.tolist()):
        turns = 8192 * 500000.0 ** (-2 * place / 128) / (2 * math.pi)
        smooth = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        assert factor == pytest.approx(1 / ((1 - smooth) / 8.0 + smooth), rel=1e-5)
    assert shape_of(config(tmp_path, "llama")).rope_factors() is None


def test_a_linear_scaling_is_a_setting(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    settings = dict(shape_of(config(tmp_path, "llama", rope_parameters=rope)).settings())
    assert (settings["rope.scaling.type"], settings["rope.scaling.factor"]) == ("linear", 4.0)


def test_a_saved_model_has_the_weights_that_are_written(tmp_path: Path) -> None:
    shape = shape_of(make_exported(tmp_path, "qwen3"))
    assert shape.head_size == 32 and "lm_head.weight" not in shape.names()
