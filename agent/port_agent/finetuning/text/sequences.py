"""Records as token sequences.

Texts are packed to full length; each completion is a separate sequence. The loss covers only the tokens to learn.
Each text for an encoder is also a separate sequence, and a long one is divided. If masked tokens are learned, each
pass masks different ones.
"""

import random
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.conversations import ConversationWriter, UnwrittenError
from port_agent.finetuning.text.records import parts_of
from port_agent.finetuning.text.sequence_file import (
    IGNORED,
    TOKEN,
    Lengths,
    SequenceFile,
    SequenceWriter,
    StoredSequences,
    TokenSequence,
)
from port_agent.finetuning.text.shapes import Record
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.text.text_encoder import LearnedText, TextEncoder
from port_planner.base.units import shown

BUCKET_TOKENS = 32
"""Completions are padded to a multiple of this: each length is a separate step to a planner."""

_MASKED_SHARE, _HIDDEN_SHARE, _REPLACED_SHARE = 0.15, 0.8, 0.1
"""Share of tokens that are learned, and the shares of those that are masked and that are replaced by another
token (BERT, section 3.1).
"""


class _EmptyError(Exception):
    """A record has no token to learn except a first one, which nothing predicts."""


@dataclass(frozen=True, slots=True)
class Split:
    """Sequences for training and for evaluation, and the `lengths` of all.

    `skipped`: records whose prompt alone fills a sequence. `unwritten`: conversations that the tokenizer's chat
    template does not write as they are; `first_unwritten`: the first, and why. `notes`: for people, about records that
    are changed.
    """

    train: StoredSequences
    held_out: StoredSequences
    lengths: Lengths
    skipped: int
    unwritten: int = 0
    first_unwritten: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The number of tokens, and the mask token, or None."""

    size: int
    mask: int | None


def split_sequences(
    records: Collection[Record],
    tokenizer: Any,
    options: FinetuneOptions,
    task: Task,
    file: SequenceFile,
    valid: Collection[Record] = (),
) -> Split:
    """Write the records' sequences to a file, and return them. Those of `valid` are held out, or, if it is empty,
    some that the seed chooses.

    Raises FinetuneError if none is left to train on, for records without a prompt if an encoder needs one, and if the
    file cannot be written.
    """
    writer = SequenceWriter(file)
    maker = SequenceMaker(tokenizer, options, task)
    writer.add(maker.sequences(records))
    order = array("q", range(writer.count))
    random.Random(options.seed).shuffle(order)
    held = int(len(order) * options.held_out) or int(len(order) > 1 and options.held_out > 0)
    if valid:
        held = 0
        writer.add(maker.sequences(valid))
    stored = writer.end()
    if len(order) <= held:
        raise maker.nothing_left(len(records))
    train, held_out = (
        stored.those(order[held:]),
        stored.those(range(len(order), len(stored)) if valid else order[:held]),
    )
    if valid and not len(held_out):
        raise FinetuneError("no sequence of --valid is left to evaluate; raise --seq-len, or give another file")
    return Split(train, held_out, writer.lengths, maker.skipped, maker.unwritten, maker.first_unwritten, maker.notes())


class SequenceMaker:
    """Makes sequences from records, and counts the records that are changed."""

    def __init__(self, tokenizer: Any, options: FinetuneOptions, task: Task) -> None:
        """Raise FinetuneError for what an encoder cannot learn, and for pairs of answers unless the
        model only continues text.
        """
        if options.learns_pairs and task.kind is not TaskKind.CAUSAL_LM:
            raise FinetuneError(f"{_pair_option(options)} is only for models that continue text; leave it out")
        if task.encoder_alone:
            _check_encoder(tokenizer, options, task)
        self._tokenizer, self._task, self._packed_tokens = tokenizer, task, options.sequence_tokens
        self._longest = (
            options.sequence_tokens if task.encoder_alone else max(options.sequence_tokens, options.answer_tokens)
        )
        self._encoder, self._borders = TextEncoder(tokenizer), options.borders
        self._pair_option = _pair_option(options)
        self._conversations = ConversationWriter.of(tokenizer, options)
        self.skipped = self.unwritten = 0
        self.first_unwritten = ""
        self._shortened = self._unread_tokens = 0
        self._cut = self._cut_tokens = self._dropped = self._most_tokens = self._spanned = self._apart = 0
        self._empty = self._endless = 0
        self._first_spanned = self._first_empty = ""

    def sequences(self, records: Collection[Record]) -> Iterator[TokenSequence]:
        """Yield the sequences of all records, the packed ones first. Raises FinetuneError."""
        if self._task.encoder_alone:
            for record in records:
                yield from self._of_encoder(record)
            return
        if self._task.decoder_start is None:
            yield from self._packed(record for record in records if record.is_text)
        for record in records:
            _check_pair(record, self._pair_option)
            try:
                found = list(self._pair(record, record.rejected) if record.rejected else self.of_record(record))
            except UnwrittenError as error:
                self.unwritten += 1
                self.first_unwritten = self.first_unwritten or f"{error} ({record.place})"
                continue
            except _EmptyError:
                self._count_empty(record)
                continue
            whole = [sequence for sequence in found if sequence is not None]
            self.skipped += bool(found) and not whole
            self._dropped += len(found) - len(whole) if whole else 0
            yield from whole

    def nothing_left(self, records: int) -> FinetuneError:
        """Return the error to raise if no sequence is left to train on."""
        if self.unwritten:
            return FinetuneError(
                f"no sequence is left to train on: the tokenizer's chat template does not write {self.unwritten} of "
                f"{records} records, the first: {self.first_unwritten}; give messages that it accepts, or prompt and "
                "completion"
            )
        if self._empty == records:
            return FinetuneError(
                f"no sequence is left to train on: none of {records} records has a token to learn; give records with "
                "longer texts or completions"
            )
        return FinetuneError(
            f"no sequence is left to train on: {self.skipped} of {records} records have a prompt of {self._longest} "
            f"tokens or more; --seq-len {self._whole_tokens} keeps all"
        )

    def notes(self) -> tuple[str, ...]:
        """Return notes on records that are changed."""
        written, end = self._conversations, self._tokenizer.eos_token
        ends = (
            f"the tokenizer's {shown(end)} is learned there"
            if end
            else "the tokenizer has no end token either, so none is learned"
        )
        ignored = ", ".join(f"{key} ({count:,})" for key, count in sorted(written.ignored.items()) if count)
        facts = (
            *self._cut_facts(),
            (
                self._empty,
                f"{self._empty:,} records are left out because they have no token to learn (the first: "
                f"{self._first_empty})",
            ),
            (
                self._endless,
                f"the tokenizer has no end token, so none is learned after {self._endless:,} texts and completions",
            ),
            (
                self._spanned,
                f"{self._spanned:,} answers begin within a token that also holds the end of the prompt and is "
                f"learned (the first: {self._first_spanned}); move the space between them to the completion",
            ),
            (
                written.bare,
                f"the chat template ends {written.bare:,} conversations with nothing after the last answer: {ends}",
            ),
            (
                written.thoughtless,
                f"the chat template begins an answer with thoughts, and {written.thoughtless:,} answers have none: no "
                "thoughts are learned",
            ),
            (
                written.greetings,
                f"{written.greetings:,} conversations begin with an answer, which is read but not learned",
            ),
            (ignored, f"the chat template does not write {ignored}, so they are not learned"),
        )
        return tuple(text for count, text in facts if count)

    def _cut_facts(self) -> tuple[tuple[int, str], ...]:
        """Return counts of what the longest length cuts off, and a note for each."""
        return (
            (
                self.skipped,
                f"{self.skipped:,} records are left out because their prompt alone fills --seq-len {self._longest}; "
                f"--seq-len {self._whole_tokens} keeps all",
            ),
            (
                self._dropped,
                f"{self._dropped:,} later answers of conversations are left out because the text before each fills "
                f"--seq-len {self._longest}; --seq-len {self._whole_tokens} keeps all",
            ),
            (
                self._cut,
                f"{self._cut:,} of {self._apart:,} answers are cut at --seq-len {self._longest}, so "
                f"{self._cut_tokens:,} tokens are not learned; --seq-len {self._whole_tokens} keeps all",
            ),
            (
                self._shortened,
                f"{self._shortened:,} texts are cut at --seq-len {self._longest}, so {self._unread_tokens:,} tokens "
                f"are not read; --seq-len {self._whole_tokens} keeps all",
            ),
        )

    @property
    def _whole_tokens(self) -> int:
        """The length in tokens at which nothing is cut, in whole buckets."""
        return -(-self._most_tokens // BUCKET_TOKENS) * BUCKET_TOKENS

    def _packed(self, texts: Iterator[Record]) -> Iterator[TokenSequence]:
        """Yield full sequences of the texts one after another, then the remainder."""
        tokens, longest, begins = array(TOKEN), self._packed_tokens, list[int]()
        for text in texts:
            self._endless += not self._encoder.end
            begins.append(len(tokens))
            for part in self._encoder.document(parts_of(text)):
                tokens.extend(part)
                whole = len(tokens) // longest * longest
                full = (
                    self._full(tokens[start : start + longest], [begin - start for begin in begins])
                    for start in range(0, whole, longest)
                )
                yield from (sequence for sequence in full if sequence.learned)
                del tokens[:whole]
                begins = [begin - whole for begin in begins if begin > whole] if whole else begins
        last = self._full(tokens, begins)
        if last.learned:
            yield last

    def _full(self, tokens: "array[int]", begins: list[int]) -> TokenSequence:
        """Return a sequence of several texts. All of it is learned except, with borders, the first token of each text.

        `begins`: offsets of the texts, with one before and one after.
        """
        if not self._borders or not tokens:
            return TokenSequence(tokens, tokens)
        inside = [begin for begin in begins if 0 < begin < len(tokens)]
        labels, places = tokens[:], array(TOKEN)
        for begin, end in pairwise((0, *inside, len(tokens))):
            places.extend(range(end - begin))
            labels[begin] = IGNORED
        return TokenSequence(tokens, labels, places=places)

    def _pair(self, record: Record, rejected: Record) -> Iterator[TokenSequence | None]:
        """Yield both answers as one sequence; None if one of them does not fit. Raises UnwrittenError, and
        FinetuneError.

        Both are learned from the same token on, as in trl. If one begins within a token of the prompt, the other's
        probability also includes the prompt's letters in that token.
        """
        chosen, other = (list(self.of_record(each)) for each in (record, rejected))
        if len(chosen) != 1 or len(other) != 1:
            raise UnwrittenError("the template writes the answers of one conversation as several texts")
        (first,), (second,) = chosen, other
        if first is None or second is None:
            yield None
            return
        begin, longest = min(_begin(first), _begin(second)), max(len(first.tokens), len(second.tokens))
        first, second = (_filled(_learned_from(begin, answer), longest) for answer in (first, second))
        yield replace(first, rejected=second)

    def of_record(self, record: Record) -> Iterator[TokenSequence | None]:
        """Yield the sequences of a record, usually one; None for a prompt that is too long.

        Raises UnwrittenError, and FinetuneError.
        """
        if self._task.decoder_start is not None:
            yield self._answer(record, self._task.decoder_start)
        elif record.messages and (record.prompt is None or self._tokenizer.chat_template):
            yield from (self._learned(text, record.place) for text in self._conversations.texts(record))
        elif record.prompt is not None:
            whole = f"{record.prompt}{record.completion}"
            yield self._learned(LearnedText(whole, ((len(record.prompt), len(whole)),)), record.place)

    def _learned(self, text: LearnedText, place: str) -> TokenSequence | None:
        """Return the sequence of a text, cut at the end if it is too long; None if the text before its
        learned part fills the sequence.

        Raises _EmptyError.
        """
        found = self._encoder.encode(text)
        longest = self._longest
        if not any(found.learned[1:]):
            raise _EmptyError
        tokens = found.tokens[:longest]
        labels = [token if learned else IGNORED for token, learned in zip(tokens, found.learned, strict=False)]
        self._most_tokens = max(self._most_tokens, len(found.tokens))
        if all(label == IGNORED for label in labels[1:]):
            return None
        self._apart += 1
        self._endless += text.begun and text.ended and not self._encoder.end
        if found.spanned:
            self._spanned += found.spanned
            self._first_spanned = self._first_spanned or place
        self._count_cut(sum(found.learned[longest:]))
        return self._padded(tokens, labels)

    def _count_empty(self, record: Record) -> None:
        self._empty += 1
        self._first_empty = self._first_empty or record.place

    def _count_cut(self, lost: int) -> None:
        self._cut += lost > 0
        self._cut_tokens += lost

    def _answer(self, record: Record, start: int) -> TokenSequence | None:
        """Return a prompt for an encoder and its completion for the decoder, cut at the end; None if the prompt is too
        long.

        Raises _EmptyError, and FinetuneError.
        """
        if record.prompt is None:
            raise FinetuneError(
                "the model has an encoder, which reads a prompt, and a decoder, which writes the completion: give "
                "records with prompt and completion, not with text or messages"
            )
        source: list[int] = self._tokenizer(record.prompt)["input_ids"]
        if not source:
            raise _EmptyError
        longest = self._longest
        target: list[int] = self._tokenizer(text_target=record.completion)["input_ids"]
        if self._tokenizer.eos_token_id is not None and target[-1:] != [self._tokenizer.eos_token_id]:
            target.append(self._tokenizer.eos_token_id)
        self._most_tokens = max(self._most_tokens, len(source), len(target) + 1)
        if len(source) > longest:
            return None
        self._apart += 1
        self._count_cut(max(0, len(target) + 1 - longest))
        found = self._padded([start, *target][:longest], [IGNORED, *target][:longest])
        return replace(found, source=array(TOKEN, source))

    def _padded(self, tokens: list[int], labels: list[int]) -> TokenSequence:
        padding = min(-len(tokens) % BUCKET_TOKENS, self._longest - len(tokens))
        reads = self._tokenizer
        filler = reads.pad_token_id if reads.pad_token_id is not None else reads.eos_token_id or 0
        return TokenSequence(
            array(TOKEN, [*tokens, *[filler] * padding]), array(TOKEN, [*labels, *[IGNORED] * padding])
        )

    def _of_encoder(self, record: Record) -> Iterator[TokenSequence]:
        """Yield the sequences of a text with the tokenizer's marks around them: one for a label, otherwise
        as many as the text fills.
        """
        if not record.is_text:
            raise FinetuneError('an encoder learns from texts; give records with "text"')
        if record.label is not None and self._task.labels:
            tokens = self._whole_text(record.text)
            if not tokens:
                self._count_empty(record)
                return
            if record.label not in self._task.labels:
                raise FinetuneError(
                    f"the label {shown(record.label)} ({record.place}) is not one of the trained labels"
                )
            label = self._task.labels.index(record.label)
            yield TokenSequence(tokens, array(TOKEN, [IGNORED] * len(tokens)), label=label)
            return
        marks = set(self._tokenizer.all_special_ids)
        begin, end = self._encoder.begin, self._encoder.marks_behind
        for part in _in_parts(self._encoder.undivided(parts_of(record)), self._longest - len(begin) - len(end)):
            tokens = array(TOKEN, [*begin, *part, *end])
            labels = array(TOKEN, [IGNORED if i == 0 or t in marks else t for i, t in enumerate(tokens)])
            sequence = TokenSequence(tokens, labels)
            if sequence.learned:
                yield sequence

    def _whole_text(self, text: str | None) -> "array[int]":
        """Return a text's tokens with the marks around them.

        A text that is too long is shortened inside, and counted.
        """
        found = self._tokenizer(text)["input_ids"]
        self._most_tokens = max(self._most_tokens, len(found))
        if len(found) > self._longest:
            self._shortened += 1
            self._unread_tokens += len(found) - self._longest
            found = self._tokenizer(text, truncation=True, max_length=self._longest)["input_ids"]
        return array(TOKEN, found)


def _pair_option(options: FinetuneOptions) -> str:
    """Return the option that requests pairs of answers; "" if none does."""
    if options.dpo is not None:
        return "--dpo"
    return "" if options.orpo is None else "--orpo"


def _check_pair(record: Record, option: str) -> None:
    if option and record.rejected is None:
        raise FinetuneError(
            f"{option} learns which of two answers is preferred, and {record.place or 'a record'} has only one; give "
            "records with prompt, chosen and rejected"
        )
    if record.rejected is not None and not option:
        raise FinetuneError(
            f"{record.place or 'a record'} has a chosen and a rejected answer; give --dpo or --orpo to learn which is "
            "preferred, or records with prompt and completion"
        )


def _begin(sequence: TokenSequence) -> int:
    """Return the place of the first learned token."""
    return next(place for place, label in enumerate(sequence.labels) if label != IGNORED)


def _learned_from(begin: int, sequence: TokenSequence) -> TokenSequence:
    """Return a sequence that is learned from a token not after its own beginning."""
    first = _begin(sequence)
    labels = sequence.labels[:begin] + sequence.tokens[begin:first] + sequence.labels[first:]
    return replace(sequence, labels=labels)


def _filled(sequence: TokenSequence, length: int) -> TokenSequence:
    """Return a sequence padded to `length` tokens, which are not learned."""
    missing = length - len(sequence.tokens)
    tokens, labels = (
        sequence.tokens + sequence.tokens[-1:] * missing,
        sequence.labels + array(TOKEN, [IGNORED] * missing),
    )
    return replace(sequence, tokens=tokens, labels=labels)


def _in_parts(lists: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Yield the concatenation of lists, in parts of `length`."""
    items = chain.from_iterable(lists)
    while part := list(islice(items, length)):
        yield part


def _check_encoder(tokenizer: Any, options: FinetuneOptions, task: Task) -> None:
    if options.sequence_tokens > tokenizer.model_max_length:
        raise FinetuneError(
            f"--seq-len {options.sequence_tokens} is more than the {tokenizer.model_max_length} tokens that this model "
            "reads at once; lower it"
        )
    if options.sample is not None:
        raise FinetuneError("this model is an encoder and writes no text; leave out --sample")
    if task.kind is TaskKind.MASKED_LM and tokenizer.mask_token_id is None:
        raise FinetuneError(
            f"the tokenizer of {options.model} has no mask token, so no words can be masked; give records a label"
        )


def masked(sequence: TokenSequence, vocabulary: Vocabulary, seed: str) -> TokenSequence:
    """Return a sequence with some tokens hidden by the seed. Only these are learned, as in the training of BERT.

    At least one token and 15 % of all are learned. Of ten, eight are replaced by the mask, one by another token, and
    one stays. Raises ValueError if there is no mask token.
    """
    if vocabulary.mask is None:
        raise ValueError("there is no mask token")
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
