"""Records as token sequences.

Text is packed to full length, completions stand each by itself; the loss is on what is to be learned.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent.finetune.options import FinetuneError, FinetuneOptions
from agent.finetune.records import Message, Record

IGNORED = -100
"""Label of a token that no loss is computed on (torch's `cross_entropy`)."""

BUCKET_TOKENS = 32
"""Completions are padded to a multiple of it: each length is a step of its own to whoever plans it."""

_LEAST_TOKENS = 2

_PIECE_CHARACTERS = 1 << 15
"""Of a text that are made tokens at once: that takes 300 bytes a character for a moment."""

_TOKEN = "i"
"""32-bit integers: a token takes 4 bytes, not the 36 of a number of Python's."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens and what each is to be predicted as, of one length."""

    tokens: "array[int]"
    labels: "array[int]"

    @property
    def learned(self) -> int:
        """How many tokens a loss is computed on: the first has none before it."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Split:
    """Sequences to train on and to look at only. `skipped`: records whose prompt alone fills a sequence."""

    train: tuple[TokenSequence, ...]
    held_out: tuple[TokenSequence, ...]
    skipped: int


def split_sequences(records: Sequence[Record], tokenizer: Any, options: FinetuneOptions) -> Split:
    """Return the records' sequences, some held out by the seed.

    Raises FinetuneError where none is left to train on.
    """
    longest = options.sequence_tokens
    packed = list(_packed((r.text for r in records if r.text is not None), tokenizer, longest))
    apart = [_completion(record, tokenizer, longest) for record in records if record.text is None]
    found = packed + [sequence for sequence in apart if sequence is not None]
    skipped = sum(sequence is None for sequence in apart)
    random.Random(options.seed).shuffle(found)
    held = int(len(found) * options.held_out) or int(len(found) > 1 and options.held_out > 0)
    if len(found) <= held:
        raise FinetuneError(
            f"no sequence is left to train on: {skipped} of {len(records)} records have a prompt of {longest} tokens or "
            "more; raise --seq-len"
        )
    return Split(tuple(found[held:]), tuple(found[:held]), skipped)


def _packed(texts: Iterator[str], tokenizer: Any, longest: int) -> Iterator[TokenSequence]:
    """Yield full sequences of the texts one after the other, and what is left over."""
    tokens = array(_TOKEN)
    for text in texts:
        for number, piece in enumerate(_pieces(text)):
            tokens.extend(tokenizer(piece, add_special_tokens=number == 0)["input_ids"])
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
    for start in range(0, len(tokens), longest):
        part = tokens[start : start + longest]
        if len(part) >= _LEAST_TOKENS:
            yield TokenSequence(part, part)


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that end with a line, where lines are shorter than a piece."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _completion(record: Record, tokenizer: Any, longest: int) -> TokenSequence | None:
    """Return a record's sequence, cut at the end where it is too long; None where its prompt fills it."""
    spans = _turns(record.messages, tokenizer) if record.messages else _prompted(record, tokenizer)
    tokens = [token for part, _ in spans for token in part][:longest]
    labels = [token if learned else IGNORED for part, learned in spans for token in part][:longest]
    if len(tokens) < _LEAST_TOKENS or all(label == IGNORED for label in labels[1:]):
        return None
    padding = min(-len(tokens) % BUCKET_TOKENS, longest - len(tokens))
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    return TokenSequence(array(_TOKEN, [*tokens, *[filler] * padding]), array(_TOKEN, [*labels, *[IGNORED] * padding]))


def _prompted(record: Record, tokenizer: Any) -> list[tuple[list[int], bool]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    completion = tokenizer(record.completion, add_special_tokens=False)["input_ids"]
    return [(tokenizer(record.prompt)["input_ids"], False), (completion + end, True)]


def _turns(messages: Sequence[Message], tokenizer: Any) -> list[tuple[list[int], bool]]:
    """Return the conversation in the tokenizer's own template, the assistant's turns to be learned.

    Raises FinetuneError where it has no template, or one in which a conversation does not begin with its beginning.
    """
    if not tokenizer.chat_template:
        raise FinetuneError(
            "the tokenizer has no chat template, so `messages` cannot be written as text; give prompt and completion, or text"
        )
    turns = [{"role": m.role, "content": m.content} for m in messages]
    spans: list[tuple[list[int], bool]] = []
    done: list[int] = []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _templated(tokenizer, turns[:i], asking=True)
        after = _templated(tokenizer, turns[: i + 1], asking=False)
        if before[: len(done)] != done or after[: len(before)] != before:
            raise FinetuneError(
                "the tokenizer's chat template writes a conversation otherwise when it goes on; give prompt and completion"
            )
        spans += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return spans


def _templated(tokenizer: Any, turns: list[dict[str, str]], *, asking: bool) -> list[int]:
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asking)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
