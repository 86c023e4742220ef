"""What is shown of a sequence is its text, cut where what is learned begins and ends."""

from array import array
from typing import Any

from port_agent.finetuning.text.examples import Example, ExamplePart, examples_of
from port_agent.finetuning.text.sequence_file import IGNORED, TOKEN, TokenSequence
from tests.agent.finetuning.text import tokenizer_zoo


def sequence(tokens: list[int], read: int, padding: int = 0) -> TokenSequence:
    labels = [IGNORED] * read + tokens[read:] + [IGNORED] * padding
    return TokenSequence(array(TOKEN, tokens + [0] * padding), array(TOKEN, labels))


def test_parts_are_what_their_tokens_add(tokenizer: Any) -> None:
    tokens = tokenizer("to be or not")["input_ids"]
    read = len(tokenizer("to be")["input_ids"])
    expected = Example((ExamplePart("to be", learned=False), ExamplePart(" or not", learned=True)))
    assert examples_of([sequence(tokens, read, padding=3)] * 3, tokenizer, (), 2) == (expected, expected)
    llama = tokenizer_zoo.made("sentencepiece")
    tokens = llama("to be or not", add_special_tokens=False)["input_ids"]
    read = len(llama("to be", add_special_tokens=False)["input_ids"])
    assert examples_of([sequence(tokens, read)], llama, (), 1) == (expected,)


def test_a_label_and_what_an_encoder_reads_are_shown(tokenizer: Any) -> None:
    tokens = array(TOKEN, tokenizer("to be")["input_ids"])
    chosen = TokenSequence(tokens, array(TOKEN, [IGNORED] * len(tokens)), label=1)
    assert examples_of([chosen], tokenizer, ("bad", "good"), 1) == (
        Example((ExamplePart("to be", learned=False),), "good"),
    )
    with_source = TokenSequence(tokens, tokens, source=array(TOKEN, tokenizer("or not")["input_ids"]))
    assert examples_of([with_source], tokenizer, (), 1)[0].parts == (
        ExamplePart("or not", learned=False),
        ExamplePart("to be", learned=True),
    )
