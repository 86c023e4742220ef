"""The judge of learned tokens distinguishes equal from different ones, and known reasons from unknown ones."""

from typing import Any

import pytest

import benchmarks.tokens as judging
from benchmarks.tokens import PAIRS, Learned, made_tokenizers, outcome

pytestmark = pytest.mark.slow

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
"""It begins thoughts where it asks, and writes none."""


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return dict(made_tokenizers())


def test_tokens_are_those_of_trl(tokenizers: dict[str, Any]) -> None:
    spaced = tokenizers["SentencePiece, a space before a text, begins a text"]
    assert [outcome(entry, spaced) for entry in PAIRS] == ["same"] * len(PAIRS)
    ended = tokenizers["SentencePiece, begins and ends a text"]
    assert outcome(PAIRS[0], ended) == "trl learns an end twice"


def test_other_tokens_are_told_with_their_reason_or_as_unexplained(
    tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, talk = tokenizers["byte-level BPE"], judging.TALKS["one turn"]
    monkeypatch.setattr(tokenizer, "chat_template", THINKS)
    assert outcome(talk, tokenizer) == "trl trains behind another prompt than the template asks with"
    right = judging.ours

    def other(entry: Any, tokenizer: Any) -> list[Learned]:
        (one,) = right(entry, tokenizer)
        return [Learned(one.tokens, (True, *one.learned[1:]))]

    monkeypatch.setattr(judging, "ours", other)
    assert outcome(PAIRS[0], tokenizer) == "unexplained"
