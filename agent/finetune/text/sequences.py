"""Records as token sequences.

Text is packed to full length, completions stand each by itself; the loss is on what is to be learned. An encoder's texts stand
each by itself, too, long ones in parts; where it learns masked tokens, each time others are masked.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.finetune.options import FinetuneError, FinetuneOptions
from agent.finetune.task import Task, TaskKind
from agent.finetune.text.conversations import Span, UnwrittenError, conversation_spans
from agent.finetune.text.records import Record
from planner.ir.units import shown

IGNORED = -100
"""Label of a token that no loss is computed on (torch's `cross_entropy`)."""

BUCKET_TOKENS = 32
"""Completions are padded to a multiple of it: each length is a step of its own to whoever plans it."""

_LEAST_TOKENS = 2

_MOST_SHOWN = 40
"""Characters of a conversation that is named."""

_PIECE_CHARACTERS = 1 << 15
"""Of a text that are made tokens at once: that takes 300 bytes a character for a moment."""

_MASKED_SHARE, _HIDDEN_SHARE, _REPLACED_SHARE = 0.15, 0.8, 0.1
"""Of tokens, those that are learned; of these, those behind the mask and those that another takes the place of (BERT, section 3.1)."""

TOKEN = "i"
"""32-bit integers: a token takes 4 bytes, not the 36 of a number of Python's."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens and what each is to be predicted as, of one length. `source`: what an encoder reads beside them, if there is one.

    `label`: the number of that which is to be chosen for them all, None where tokens are predicted.
    """

    tokens: "array[int]"
    labels: "array[int]"
    source: "array[int] | None" = None
    label: int | None = None

    @property
    def learned(self) -> int:
        """How many tokens a loss is computed on, never the first, or 1 where a label is chosen."""
        if self.label is not None:
            return 1
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Split:
    """Sequences to train on and to look at only. `skipped`: records whose prompt alone fills a sequence, an encoder's or one for both.

    `unwritten`: conversations that the tokenizer's chat template refuses, `first_unwritten` which and why.
    """

    train: tuple[TokenSequence, ...]
    held_out: tuple[TokenSequence, ...]
    skipped: int
    unwritten: int = 0
    first_unwritten: str = ""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How many tokens there are, and which one hides another; None where none does."""

    size: int
    mask: int | None


def split_sequences(records: Sequence[Record], tokenizer: Any, options: FinetuneOptions, task: Task) -> Split:
    """Return the records' sequences, some held out by the seed.

    Raises FinetuneError where none is left to train on, and for records without a prompt where an encoder is to read one.
    """
    longest = options.sequence_tokens
    packed: list[TokenSequence] = []
    apart: list[TokenSequence | None] = []
    unwritten: list[str] = []
    if task.encoder_alone:
        _check_encoder(tokenizer, options, task)
        packed = [sequence for record in records for sequence in _of_encoder(record, tokenizer, longest, task)]
    elif task.decoder_start is not None:
        apart = [_answer(record, tokenizer, longest, task.decoder_start) for record in records]
    else:
        packed = list(_packed((r.text for r in records if r.text is not None), tokenizer, longest))
        for record in records:
            try:
                apart += [] if record.text is not None else _completions(record, tokenizer, longest)
            except UnwrittenError as error:
                unwritten.append(f"{error} (in the one with {shown(record.messages[0].content[:_MOST_SHOWN])})")
    found = packed + [sequence for sequence in apart if sequence is not None]
    skipped = sum(sequence is None for sequence in apart)
    random.Random(options.seed).shuffle(found)
    held = int(len(found) * options.held_out) or int(len(found) > 1 and options.held_out > 0)
    if len(found) <= held and unwritten:
        raise FinetuneError(
            f"no sequence is left to train on: the tokenizer's chat template refuses {len(unwritten)} of {len(records)} records, the "
            f"first: {unwritten[0]}; give messages that it can write, or prompt and completion"
        )
    if len(found) <= held:
        raise FinetuneError(
            f"no sequence is left to train on: {skipped} of {len(records)} records have a prompt of {longest} tokens or "
            "more; raise --seq-len"
        )
    return Split(tuple(found[held:]), tuple(found[:held]), skipped, len(unwritten), "".join(unwritten[:1]))


def _packed(texts: Iterator[str], tokenizer: Any, longest: int) -> Iterator[TokenSequence]:
    """Yield full sequences of the texts one after the other, and what is left over."""
    tokens = array(TOKEN)
    for text in texts:
        for number, piece in enumerate(_pieces(text)):
            tokens.extend(tokenizer(piece, add_special_tokens=number == 0)["input_ids"])
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
    for start in range(0, len(tokens), longest):
        part = tokens[start : start + longest]
        if len(part) >= _LEAST_TOKENS:
            yield TokenSequence(part, part)


def _check_encoder(tokenizer: Any, options: FinetuneOptions, task: Task) -> None:
    if options.sequence_tokens > tokenizer.model_max_length:
        raise FinetuneError(
            f"--seq-len {options.sequence_tokens} is more than the {tokenizer.model_max_length} tokens that this model reads at once; "
            "lower it"
        )
    if options.sample is not None:
        raise FinetuneError("this model is an encoder and writes no text; leave --sample away")
    if task.kind is TaskKind.MASKED_LM and tokenizer.mask_token_id is None:
        raise FinetuneError(
            f"the tokenizer of {options.model} has no mask token, so no words can be masked; give records a label"
        )


def _of_encoder(record: Record, tokenizer: Any, longest: int, task: Task) -> Iterator[TokenSequence]:
    """Yield a text's sequences with the marks that the tokenizer puts around them: one for a label, else as many as it fills."""
    if record.text is None:
        raise FinetuneError('an encoder learns of texts; give records with "text"')
    if record.label is not None and task.labels:
        tokens = array(TOKEN, tokenizer(record.text, truncation=True, max_length=longest)["input_ids"])
        yield TokenSequence(tokens, array(TOKEN, [IGNORED] * len(tokens)), label=task.labels.index(record.label))
        return
    marks = set(tokenizer.all_special_ids)
    for piece in _pieces(record.text):
        parts = tokenizer(piece, truncation=True, max_length=longest, return_overflowing_tokens=True)["input_ids"]
        for part in parts:
            labels = array(TOKEN, [IGNORED if i == 0 or t in marks else t for i, t in enumerate(part)])
            sequence = TokenSequence(array(TOKEN, part), labels)
            if sequence.learned:
                yield sequence


def masked(sequence: TokenSequence, vocabulary: Vocabulary, seed: str) -> TokenSequence:
    """Return a sequence with some of its tokens hidden by the seed, and those alone to be learned, as BERT was trained.

    15 % are to be learned, one at least: of ten, eight are hidden behind the mask, one is another token, one stays. Raises
    ValueError where no token hides others.
    """
    if vocabulary.mask is None:
        raise ValueError("no token hides others")
    numbers = random.Random(seed)
    may_be = [place for place, label in enumerate(sequence.labels) if label != IGNORED]
    chosen = numbers.sample(may_be, max(1, round(_MASKED_SHARE * len(may_be))))
    tokens, labels = sequence.tokens[:], array(TOKEN, [IGNORED] * len(sequence.labels))
    for place in chosen:
        labels[place] = sequence.labels[place]
        draw = numbers.random()
        if draw < _HIDDEN_SHARE:
            tokens[place] = vocabulary.mask
        elif draw < _HIDDEN_SHARE + _REPLACED_SHARE:
            tokens[place] = numbers.randrange(vocabulary.size)
    return replace(sequence, tokens=tokens, labels=labels)


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that end with a line, where lines are shorter than a piece."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _completions(record: Record, tokenizer: Any, longest: int) -> list[TokenSequence | None]:
    """Return a record's sequences, one but for some conversations; a single None where what is asked fills them. Raises UnwrittenError."""
    if not record.messages:
        return [_completion(_prompted(record, tokenizer), tokenizer, longest)]
    found = [_completion(spans, tokenizer, longest) for spans in conversation_spans(record.messages, tokenizer)]
    return [sequence for sequence in found if sequence is not None] or [None]


def _completion(spans: Sequence[Span], tokenizer: Any, longest: int) -> TokenSequence | None:
    """Return the sequence of some spans, cut at the end where it is too long; None where what is not learned fills it."""
    tokens = [token for part, _ in spans for token in part][:longest]
    labels = [token if learned else IGNORED for part, learned in spans for token in part][:longest]
    if len(tokens) < _LEAST_TOKENS or all(label == IGNORED for label in labels[1:]):
        return None
    return _padded(tokens, labels, tokenizer, longest)


def _answer(record: Record, tokenizer: Any, longest: int, start: int) -> TokenSequence | None:
    """Return a prompt for an encoder and its completion for the decoder, cut at the end; None where the prompt is too long."""
    if record.prompt is None:
        raise FinetuneError(
            "the model has an encoder, which reads a prompt, and a decoder, which writes the completion: give records with prompt and "
            "completion, no text and no messages"
        )
    source: list[int] = tokenizer(record.prompt)["input_ids"]
    if len(source) > longest:
        return None
    target: list[int] = tokenizer(text_target=record.completion)["input_ids"]
    if tokenizer.eos_token_id is not None and target[-1:] != [tokenizer.eos_token_id]:
        target.append(tokenizer.eos_token_id)
    found = _padded([start, *target][:longest], [IGNORED, *target][:longest], tokenizer, longest)
    return replace(found, source=array(TOKEN, source))


def _padded(tokens: list[int], labels: list[int], tokenizer: Any, longest: int) -> TokenSequence:
    padding = min(-len(tokens) % BUCKET_TOKENS, longest - len(tokens))
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    return TokenSequence(array(TOKEN, [*tokens, *[filler] * padding]), array(TOKEN, [*labels, *[IGNORED] * padding]))


def _prompted(record: Record, tokenizer: Any) -> list[Span]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    completion = tokenizer(record.completion, add_special_tokens=False)["input_ids"]
    return [(tokenizer(record.prompt)["input_ids"], False), (completion + end, True)]
