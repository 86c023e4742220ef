"""What is trained on is the tokenizer's output on the whole text, of every kind of tokenizer, and what is learned is
cut from it by characters.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.text_encoder import LearnedText, TextEncoder
from tests.agent.finetuning.text import tokenizer_zoo
from tests.agent.finetuning.text.tokenizer_zoo import CORPUS, NAMES

PAIRS = [
    ("2+2=", "4"), ("2+2= ", "4"), ("question: what", " is it? answer: four"), ("def add(a, b):\n", "    return a + b\n"), ("to be", "or not"),
    ("", "to be"), ("🙂", "🙂🙂"), ("もっと、", "日本語"), ("no   ", "   more"), ("café ", "naïve"), ("a\n\n", "\n\tb"), ("x<|end|>", "to be<|end|>"),
]  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def zoo(request: pytest.FixtureRequest) -> Any:
    return tokenizer_zoo.made(request.param)


class Slow:
    """A tokenizer that says of no token where it lies, as those written in Python do."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.eos_token_id = inner.eos_token_id

    def __call__(self, text: str, **how: Any) -> Any:
        return {"input_ids": self._inner(text, **how)["input_ids"]}


def whole(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_prompt_and_its_answer_are_the_tokens_of_the_whole_and_those_of_the_answer_are_learned(
    zoo: Any, pair: tuple[str, str], slow: bool
) -> None:
    prompt, answer = pair
    encoder = TextEncoder(Slow(zoo) if slow else zoo)
    found = encoder.encode(LearnedText(prompt + answer, ((len(prompt), len(prompt + answer)),)))
    tokens = whole(zoo, prompt + answer)
    assert found.tokens == [*encoder.begin, *tokens, *encoder.end]
    inner = found.learned[len(encoder.begin) : len(encoder.begin) + len(tokens)]
    assert found.learned[: len(encoder.begin)] == [False] * len(encoder.begin) and all(
        found.learned[-len(encoder.end) :]
    )
    alone = whole(zoo, prompt)
    common = next(
        (i for i, (a, b) in enumerate(zip(alone, tokens, strict=False)) if a != b), min(len(alone), len(tokens))
    )
    assert inner == [False] * common + [True] * (len(tokens) - common), (
        "as trl has it: from where prompt and whole differ"
    )
    assert found.spanned == (common < len(alone)), "counted where the prompt alone has other tokens"


def test_begin_and_end_are_placed_once(zoo: Any) -> None:
    encoder = TextEncoder(zoo)
    found = encoder.encode(LearnedText("<s>to be</s>", ((8, 12),)))
    assert found.tokens.count(1) == 1 and found.tokens.count(2) == 1 and found.tokens[-1] == 2
    assert encoder.end.count(2) == 1 and encoder.begin in ([], [1])
    (tokens,) = [[token for part in encoder.document(["<s>to be</s>"]) for token in part]]
    assert tokens.count(1) == 1 and tokens.count(2) == 1
    assert [t for part in encoder.document([]) for t in part] == [*encoder.begin, *encoder.end]


def texts() -> Iterator[str]:
    """Yield long texts that tokenizers find hard to be stopped in."""
    numbers = random.Random(0)
    words = " ".join(CORPUS).split(" ")
    yield "".join(numbers.choices(CORPUS, k=40))
    yield " ".join(numbers.choices(words, k=1500))
    yield "".join(numbers.choices("".join(CORPUS), k=6000))
    yield "a" * 3000 + "b" + " " * 3000 + "tototototo" * 300
    yield "short"


@pytest.mark.parametrize("part", [700, 2111])
def test_a_text_in_parts_has_the_tokens_of_the_whole(zoo: Any, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port_agent.finetuning.text.text_encoder._OVERLAP_CHARACTERS", 600)
    monkeypatch.setattr("port_agent.finetuning.text.text_encoder._AGREEING_TOKENS", 16)
    encoder = TextEncoder(zoo)
    for text in texts():
        parts = [text[start : start + part] for start in range(0, len(text), part)]
        found = [token for tokens in encoder.document(parts) for token in tokens]
        assert found == [*encoder.begin, *whole(zoo, text), *encoder.end]
        assert [t for tokens in TextEncoder(Slow(zoo)).document(parts) for t in tokens] == found


def test_windows_that_group_digits_otherwise_are_not_joined() -> None:
    """Most digits are tokens of their own here, so that windows agree for a while however they group them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    tokenizer.train_from_iterator(["0123456789", "86 86"], trainers.BpeTrainer(vocab_size=12))
    grouping = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "".join(random.Random(1).choices("0123456789", k=40_000))
    assert {"86"} == {token for token in grouping.get_vocab() if len(token) > 1}
    for part in (10_000, 10_001):
        found = TextEncoder(grouping).undivided(text[start : start + part] for start in range(0, len(text), part))
        assert [token for tokens in found for token in tokens] == whole(grouping, text)


def test_ordinary_text_is_read_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, read = tokenizer_zoo.made(NAMES[0]), list[int]()
    encoder, text, part = TextEncoder(zoo), " ".join(CORPUS) * 100, 10_000
    located = encoder._located
    monkeypatch.setattr(encoder, "_located", lambda text, shift: (read.append(len(text)), located(text, shift))[1])
    list(encoder.undivided(text[start : start + part] for start in range(0, len(text), part)))
    assert len(read) == -(-len(text) // part) > 1


def test_a_tokenizer_of_which_the_marks_cannot_be_told_is_refused() -> None:
    calls = iter(([5], [7, 8]))
    with pytest.raises(FinetuneError, match=r"makes tokens \[7, 8\] of 'a' with its marks and \[5\] without"):
        TextEncoder(
            type("Odd", (), {"eos_token_id": 2, "__call__": lambda self, text, **how: {"input_ids": next(calls)}})()
        )
