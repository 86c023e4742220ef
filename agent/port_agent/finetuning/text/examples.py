"""Sequences decoded to text for people, which shows what is read and what is learned."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from port_agent.finetuning.text.sequence_file import IGNORED, TokenSequence


@dataclass(frozen=True, slots=True)
class ExamplePart:
    """A part of a sequence, and whether it is learned."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence up to its last learned token, decoded; `label`: the label to learn if the whole text is read."""

    parts: tuple[ExamplePart, ...]
    label: str | None = None


def examples_of(
    sequences: Iterable[TokenSequence], tokenizer: Any, labels: tuple[str, ...], count: int
) -> tuple[Example, ...]:
    """Return the first `count` sequences as text."""
    return tuple(_example(sequence, tokenizer, labels) for sequence in islice(sequences, count))


def _example(sequence: TokenSequence, tokenizer: Any, labels: tuple[str, ...]) -> Example:
    if sequence.label is not None:
        return Example((ExamplePart(tokenizer.decode(list(sequence.tokens)), learned=False),), labels[sequence.label])
    source = (
        [ExamplePart(tokenizer.decode(list(sequence.source)), learned=False)] if sequence.source is not None else []
    )
    rejected = (
        (ExamplePart("\nrejected: ", learned=False), *_parts(sequence.rejected, tokenizer))
        if sequence.rejected is not None
        else ()
    )
    return Example((*source, *_parts(sequence, tokenizer), *rejected))


def _parts(sequence: TokenSequence, tokenizer: Any) -> Iterator[ExamplePart]:
    """Yield the parts of a text, each as its tokens extend the text before; decoded alone, a part
    would lose its first space.
    """
    tokens = list(sequence.tokens)
    learned = [label != IGNORED for label in sequence.labels]
    end = max((place + 1 for place, one in enumerate(learned) if one), default=0)
    written, done = "", 0
    for is_learned, run in groupby(learned[:end]):
        done += len(list(run))
        text = tokenizer.decode(tokens[:done], clean_up_tokenization_spaces=False)
        yield ExamplePart(text[len(written) :], is_learned)
        written = text
