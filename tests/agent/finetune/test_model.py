"""What of a model is trained: adapters in 32 bits over frozen weights, or everything."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from agent.finetune.model import load_model
from agent.finetune.options import FinetuneError, FinetuneOptions
from tests.agent.finetune.tiny_model import make_model


def say(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_adapters_are_trained_in_32_bits_and_the_rest_is_frozen(folder: Path) -> None:
    model = load_model(FinetuneOptions(str(folder), "", "", lora_rank=2), say)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == {"q_proj", "v_proj"}
    assert all(p.dtype == torch.bfloat16 for p in model.parameters() if not p.requires_grad)


def test_targets_are_those_asked_for(folder: Path) -> None:
    model = load_model(FinetuneOptions(str(folder), "", "", targets=("up_proj",)), say)
    assert {n.split(".lora_")[0].rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad} == {
        "up_proj"
    }
    with pytest.raises(FinetuneError, match="no layer w_q; it has down_proj, gate_proj, k_proj, lm_head"):
        load_model(FinetuneOptions(str(folder), "", "", targets=("up_proj", "w_q")), say)


def test_all_weights_are_trained_in_32_bits(folder: Path) -> None:
    model = load_model(FinetuneOptions(str(folder), "", "", lora_rank=None), say)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


def test_the_same_seed_makes_the_same_adapters(folder: Path) -> None:
    first, second = (load_model(FinetuneOptions(str(folder), "", "", seed=3), say) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"bert"', '"vit"'))
    with pytest.raises(FinetuneError, match="is a vit, which transformers knows no causal language model of"):
        load_model(FinetuneOptions(str(tmp_path), "", ""), say)
