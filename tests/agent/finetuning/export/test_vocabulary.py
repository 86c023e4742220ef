"""A tokenizer is written under llama.cpp's name of its splitting, or refused by name."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from port_agent.finetuning.export.vocabulary import TokenKind, vocabulary_of
from port_agent.finetuning.inputs.options import FinetuneError
from tests.agent.finetuning.export.exported_models import SPLITTINGS, VOCABULARY, resplit
from tests.agent.finetuning.tiny_model import TEMPLATE, make_model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a tokenizer.json."""
    found: dict[str, Any] = json.loads((make_model(tmp_path_factory.mktemp("words")) / "tokenizer.json").read_text())
    return found


def tokenizer_of(written: dict[str, Any]) -> Any:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_a_splitting_has_its_name(splitting: str, written: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(resplit(written, splitting))
    tokenizer.add_tokens(["user's own"])
    found = vocabulary_of(tokenizer, VOCABULARY)
    assert (found.splitting, found.normalized) == (splitting, splitting == "qwen2")
    assert len(found.tokens) == len(found.kinds) == VOCABULARY and found.template == TEMPLATE
    assert found.kinds[:3] == (TokenKind.CONTROL,) * 3 and found.kinds[3] is TokenKind.NORMAL
    assert list(found.tokens[: len(tokenizer)]) == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert (found.tokens[len(tokenizer) - 1], found.kinds[len(tokenizer) - 1]) == ("user's own", TokenKind.USER_DEFINED)
    assert (found.tokens[-1], found.kinds[-1]) == (f"[PAD{VOCABULARY - 1}]", TokenKind.UNUSED)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "other"}
    assert vocabulary_of(tokenizer, VOCABULARY).template == TEMPLATE
    assert dict(found.marks) == {"bos": 0, "eos": 1} and not found.begins and not found.ends
    assert all(merge.count(" ") == 1 for merge in found.merges)


def test_marks_that_a_tokenizer_adds_are_added_there(written: dict[str, Any]) -> None:
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    marked = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    found = vocabulary_of(tokenizer_of({**written, "post_processor": marked}), VOCABULARY)
    assert found.begins and not found.ends


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": {"byte_fallback": True}}, "the tokenizer is SentencePiece's BPE, and export writes byte-level BPE"),
        ({"model": {"ignore_merges": True}}, "which is not one of llama.cpp's gpt-2, smollm, llama-bpe, qwen2"),
        ({"normalizer": {"type": "Lowercase"}}, "which is not one of llama.cpp's"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, r'splits text by {"type": "Whitespace"}'),
    ],
)
def test_others_are_refused(changed: dict[str, Any], said: str, written: dict[str, Any]) -> None:
    other = {**written, **changed}
    if "model" in changed:
        other["model"] = {**written["model"], **changed["model"]}
    with pytest.raises(FinetuneError, match=said):
        vocabulary_of(tokenizer_of(other), VOCABULARY)


def test_a_tokenizer_of_another_model_is_refused(written: dict[str, Any]) -> None:
    with pytest.raises(FinetuneError, match=r"the tokenizer has a token \d+, and the model 20 tokens"):
        vocabulary_of(tokenizer_of(written), 20)
