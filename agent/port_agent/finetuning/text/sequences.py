"""Records as token sequences.

Text is packed to full length, completions stand each by itself; the loss is on what is to be learned. An encoder's texts stand
each by itself, too, long ones in parts; where it learns masked tokens, each time others are masked.
"""

import random
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.conversations import Span, UnwrittenError, conversation_spans
from port_agent.finetuning.text.records import Record
from port_agent.finetuning.text.sequence_file import (
    IGNORED,
    TOKEN,
    Lengths,
    SequenceFile,
    SequenceWriter,
    StoredSequences,
    TokenSequence,
)
from port_agent.finetuning.text.task import Task, TaskKind
from port_planner.base.units import shown

BUCKET_TOKENS = 32
"""Completions are padded to a multiple of it: each length is a step of its own to whoever plans it."""

_MIN_TOKENS = 2

_MAX_SHOWN = 40
"""Characters of a conversation that is named."""

_MASKED_SHARE, _HIDDEN_SHARE, _REPLACED_SHARE = 0.15, 0.8, 0.1
"""Of tokens, those that are learned; of these, those behind the mask and those that another takes the place of (BERT, section 3.1)."""


@dataclass(frozen=True, slots=True)
class Split:
    """Sequences to train on and to look at only, and the `lengths` of all. `skipped`: records whose prompt alone fills a sequence, an encoder's or one for both.

    `unwritten`: conversations that the tokenizer's chat template refuses, `first_unwritten` which and why.
    """

    train: StoredSequences
    held_out: StoredSequences
    lengths: Lengths
    skipped: int
    unwritten: int = 0
    first_unwritten: str = ""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How many tokens there are, and which one hides another; None where none does."""

    size: int
    mask: int | None


def split_sequences(
    records: Collection[Record], tokenizer: Any, options: FinetuneOptions, task: Task, file: SequenceFile
) -> Split:
    """Write the records' sequences to a file, and return them, some held out by the seed.

    Raises FinetuneError where none is left to train on, for records without a prompt where an encoder is to read one, and where the file
    cannot be written.
    """
    longest = options.sequence_tokens
    skipped = unwritten = 0
    first_unwritten = ""
    writer = SequenceWriter(file)
    if task.encoder_alone:
        _check_encoder(tokenizer, options, task)
        for record in records:
            writer.add(_of_encoder(record, tokenizer, longest, task))
    elif task.decoder_start is None:
        writer.add(_packed((record for record in records if record.is_text), tokenizer, longest))
    for record in () if task.encoder_alone else records:
        try:
            found = _apart(record, tokenizer, longest, task)
        except UnwrittenError as error:
            unwritten += 1
            first_unwritten = (
                first_unwritten or f"{error} (in the one with {shown(record.messages[0].content[:_MAX_SHOWN])})"
            )
        else:
            skipped += found.count(None)
            writer.add(sequence for sequence in found if sequence is not None)
    stored = writer.end()
    order = array("q", range(len(stored)))
    random.Random(options.seed).shuffle(order)
    held = int(len(order) * options.held_out) or int(len(order) > 1 and options.held_out > 0)
    if len(order) <= held and unwritten:
        raise FinetuneError(
            f"no sequence is left to train on: the tokenizer's chat template refuses {unwritten} of {len(records)} records, the "
            f"first: {first_unwritten}; give messages that it can write, or prompt and completion"
        )
    if len(order) <= held:
        raise FinetuneError(
            f"no sequence is left to train on: {skipped} of {len(records)} records have a prompt of {longest} tokens or "
            "more; raise --seq-len"
        )
    train, held_out = stored.those(order[held:]), stored.those(order[:held])
    return Split(train, held_out, writer.lengths, skipped, unwritten, first_unwritten)


def _packed(texts: Iterator[Record], tokenizer: Any, longest: int) -> Iterator[TokenSequence]:
    """Yield full sequences of the texts one after the other, and what is left over."""
    tokens = array(TOKEN)
    for part in _as_tokens(texts, tokenizer):
        tokens.extend(part)
        whole = len(tokens) // longest * longest
        for start in range(0, whole, longest):
            full = tokens[start : start + longest]
            yield TokenSequence(full, full)
        del tokens[:whole]
    if len(tokens) >= _MIN_TOKENS:
        yield TokenSequence(tokens, tokens)


def _as_tokens(texts: Iterator[Record], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of texts, each ended as the tokenizer ends one."""
    for text in texts:
        for number, piece in enumerate(text.pieces()):
            yield tokenizer(piece, add_special_tokens=number == 0)["input_ids"]
        if tokenizer.eos_token_id is not None:
            yield [tokenizer.eos_token_id]


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
    if not record.is_text:
        raise FinetuneError('an encoder learns of texts; give records with "text"')
    if record.label is not None and task.labels:
        tokens = array(TOKEN, tokenizer(record.text, truncation=True, max_length=longest)["input_ids"])
        yield TokenSequence(tokens, array(TOKEN, [IGNORED] * len(tokens)), label=task.labels.index(record.label))
        return
    marks = set(tokenizer.all_special_ids)
    for piece in record.pieces():
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


def _apart(record: Record, tokenizer: Any, longest: int, task: Task) -> list[TokenSequence | None]:
    """Return the sequences of a record that stand by themselves, a single None where what is asked fills them. Raises UnwrittenError."""
    if task.decoder_start is not None:
        return [_answer(record, tokenizer, longest, task.decoder_start)]
    return [] if record.is_text else _completions(record, tokenizer, longest)


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
    if len(tokens) < _MIN_TOKENS or all(label == IGNORED for label in labels[1:]):
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
