"""What a model learns, by its kind and the records."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.shapes import Record
from port_agent.finetuning.text.task import Task, TaskKind, task_of
from tests.agent.finetuning.tiny_model import make_model


def labelled(*labels: str | None) -> tuple[Record, ...]:
    return tuple(Record(text="to be", label=label) for label in labels)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_an_encoder_finds_masked_tokens_or_chooses_a_label(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert task_of(tmp_path, labelled(None, None)) == Task(TaskKind.MASKED_LM)
    assert task_of(tmp_path, labelled("no", "yes", "no")) == Task(TaskKind.CLASSIFICATION, labels=("no", "yes"))
    for records, reason in (
        ((Record(prompt="to", completion="be"),), "an encoder: it writes no text, and 1 of 1 records have prompts"),
        (labelled("no", None), "1 of 2 records have a label; give all of them one"),
        (labelled("no", "no"), "all 2 records have the label no; there is nothing to choose"),
    ):
        with pytest.raises(FinetuneError, match=reason):
            task_of(tmp_path, records)


def test_what_a_decoder_begins_with_must_be_known(tmp_path: Path) -> None:
    folder = make_model(tmp_path, kind="t5")
    assert task_of(folder) == Task(TaskKind.SEQ2SEQ_LM, 1)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"decoder_start_token_id": 1', '"decoder_start_token_id": null'))
    with pytest.raises(FinetuneError, match=r"what the decoder of this t5 begins with \(decoder_start_token_id\)"):
        task_of(folder)


def test_code_of_a_models_own_is_not_run_nor_needed_where_transformers_knows_the_kind(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    auto_map = {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    path.write_text(json.dumps({"model_type": "phi3", "auto_map": auto_map}))
    assert task_of(tmp_path) == Task(TaskKind.CAUSAL_LM), "as the directories of Phi-3 are"
    path.write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    with pytest.raises(
        FinetuneError,
        match=r"is a 'mine', which transformers .* does not know, and code of its own \(auto_map\) is not run",
    ):
        task_of(tmp_path)


def test_a_configuration_of_nonsense_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(FinetuneError, match=r"config.json is not a valid configuration of a llama \(.*hidden_size"):
        task_of(tmp_path)


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"bert"', '"vit"'))
    with pytest.raises(FinetuneError, match="is a vit, for which transformers has no causal language model"):
        task_of(tmp_path)
