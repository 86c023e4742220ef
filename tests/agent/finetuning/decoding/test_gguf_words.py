"""A tokenizer that is made from a file's settings is the one that the file was written from."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from port_agent.finetuning.decoding.gguf_words import check_tokens, named_ends, tokenizer_from
from port_agent.finetuning.export.vocabulary import vocabulary_of
from port_agent.finetuning.inputs.options import FinetuneError
from tests.agent.finetuning.export.exported_models import SPLITTINGS, VOCABULARY, resplit
from tests.agent.finetuning.tiny_model import TEMPLATE, make_model

TEXTS = (
    "to be or not 2 be, that's 123 4567\n\n  nobler",
    "naïve e\u0301 東京 \U0001f642",
    "<s>user\nthat</s> a user's own is",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("words"))


def tokenizer_of(folder: Path, splitting: str) -> Any:
    written = resplit(json.loads((folder / "tokenizer.json").read_text()), splitting)
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), bos_token="<s>", eos_token="</s>"
    )
    made.add_tokens(["user's own"])
    made.chat_template = TEMPLATE
    return made


def settings_of(tokenizer: Any, **others: Any) -> dict[str, Any]:
    """Return what a file says of a tokenizer."""
    found = vocabulary_of(tokenizer, VOCABULARY)
    given = {
        "model": "gpt2", "pre": found.splitting, "tokens": list(found.tokens), "token_type": list(map(int, found.kinds)),
        "merges": list(found.merges), **{f"{mark}_token_id": number for mark, number in found.marks.items()}, **others,
    }  # fmt: skip
    return {
        "tokenizer.chat_template": found.template,
        **{f"tokenizer.ggml.{key}": value for key, value in given.items()},
    }


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_it_has_the_tokens_of_the_one_written(splitting: str, folder: Path) -> None:
    tokenizer = tokenizer_of(folder, splitting)
    given = settings_of(tokenizer, add_bos_token=False)
    made = tokenizer_from(given, 77)
    for text in TEXTS:
        assert made(text)["input_ids"] == tokenizer(text)["input_ids"], text
        assert made.decode(made(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    assert vocabulary_of(made, VOCABULARY) == vocabulary_of(tokenizer, VOCABULARY)
    assert (made.chat_template, made.model_max_length, made.bos_token_id, made.eos_token) == (TEMPLATE, 77, 0, "</s>")
    check_tokens(made, given, "it")


def test_marks_are_added_as_the_file_says(folder: Path) -> None:
    plain = tokenizer_of(folder, "llama-bpe")
    text = plain("to be")["input_ids"]
    begun = {True: [0], False: []}
    for begins, ends in ((True, True), (True, False), (False, True)):
        made = tokenizer_from(settings_of(plain, add_bos_token=begins, add_eos_token=ends), 77)
        assert made("to be")["input_ids"] == [*begun[begins], *text, *([1] if ends else [])]
        assert made("to be", add_special_tokens=False)["input_ids"] == text
    assert tokenizer_from(settings_of(plain), 77)("to be")["input_ids"] == [0, *text]
    assert tokenizer_from(settings_of(tokenizer_of(folder, "gpt-2")), 77)("to be")["input_ids"][0] != 0


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            {"model": "llama"},
            "tokenizer is 'llama' with the splitting 'gpt-2', and decode makes gpt2 .*--tokenizer DIR",
        ),
        ({"pre": "deepseek-r1-qwen"}, "with the splitting 'deepseek-r1-qwen'"),
        ({"add_space_prefix": True}, r"tokenizer has 'tokenizer\.ggml\.add_space_prefix', which decode does not read"),
        ({"precompiled_charsmap": [1]}, r"tokenizer has 'tokenizer\.ggml\.precompiled_charsmap'"),
    ],
)
def test_others_are_refused(others: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(FinetuneError, match=said):
        tokenizer_from(settings_of(tokenizer_of(folder, "gpt-2"), **others), 77)


def test_another_models_tokenizer_is_refused(folder: Path) -> None:
    given = settings_of(tokenizer_of(folder, "gpt-2"))
    given["tokenizer.ggml.tokens"][5] = "other"
    with pytest.raises(FinetuneError, match=r"token 5 is 'other' in the file and .* in here; give the tokenizer"):
        check_tokens(tokenizer_of(folder, "gpt-2"), given, "here")
    short = PreTrainedTokenizerFast.from_pretrained(folder)
    with pytest.raises(FinetuneError, match=r"user's own. in the file and .None. in here"):
        check_tokens(short, settings_of(tokenizer_of(folder, "gpt-2")), "here")


def test_an_answer_ends_where_the_file_says() -> None:
    given = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("eos", 2), ("eot", 5), ("eom", 2))}
    assert named_ends(given) == [2, 5] and named_ends({}) == []
