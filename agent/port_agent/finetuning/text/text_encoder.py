"""Text as tokens: the whole text is tokenized once, and its learned parts are located by characters.

Parts that are tokenized separately give different tokens: SentencePiece puts a space before each, and a byte-level BPE
would have joined letters across the border. So the tokens of a text are always the tokenizer's for all of it. A file
that is too long for one call is read in overlapping windows, joined where both have the same tokens for a while.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from port_agent.finetuning.inputs.options import FinetuneError

_PROBE = "a"
"""Text that is tokenized with and without the tokenizer's marks, to see which marks it adds and where."""

_OVERLAP_CHARACTERS = 2048
"""Overlap of two windows: many times the longest token."""

_AGREEING_TOKENS = 32
"""Number of tokens before and after a joint on which both windows must agree."""

_AGREEING_SHARE = 0.75
"""Share of the characters of both windows that must have the same tokens: all except those near
a border that cuts a word.
"""

Span = tuple[int, int]
"""A span of characters: the first, and the one after the last."""

_Token = tuple[int, int, int]
"""A token's number, and its characters in the whole text."""


@dataclass(frozen=True, slots=True)
class LearnedText:
    """A text with its learned spans, and whether the tokenizer's begin and end marks belong around it, once.

    A template writes its own marks; `ended`: whether it ended an answer with nothing.
    """

    text: str
    learned: tuple[Span, ...]
    begun: bool = True
    ended: bool = True


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The tokens of a whole text, which of them are learned, and the number of borders of learned
    spans that lie within a token.

    Such a token is learned, because it has characters of the answer.
    """

    tokens: list[int]
    learned: list[bool]
    spanned: int


class TextEncoder:
    """A tokenizer and its marks.

    `begin`, `end`: the marks around a text; the last of `end` is the end of a text, if there is one.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raise FinetuneError if the tokenizer's marks change the other tokens of a text."""
        self._tokenizer = tokenizer
        self.begin, self.marks_behind = self._marks()
        last = tokenizer.eos_token_id
        self.end = self.marks_behind if last is None or last in self.marks_behind else [*self.marks_behind, last]

    def encode(self, text: LearnedText) -> EncodedText:
        """Return the tokens of a text."""
        if self._tokenizer.is_fast:
            located = self._located(text.text, 0)
            tokens = [token for token, _, _ in located]
        else:
            tokens = self._tokenizer(text.text, add_special_tokens=False)["input_ids"]
            located = []
        learned, spanned = [False] * len(tokens), 0
        for first, end in text.learned:
            before, begun = self._border(text.text, first, tokens, located)
            _, stop = self._border(text.text, end, tokens, located)
            learned[before:stop] = [True] * (stop - before)
            spanned += before < begun
        if text.begun and tokens[: len(self.begin)] != self.begin:
            tokens, learned = [*self.begin, *tokens], [*([False] * len(self.begin)), *learned]
        if text.ended:
            missing = [] if self.end and tokens[-len(self.end) :] == self.end else self.end
            tokens, learned = [*tokens, *missing], [*learned, *([True] * len(missing))]
        return EncodedText(tokens, learned, spanned)

    def document(self, parts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the tokens of a text that comes in parts, some at a time, equal to those of the whole, between its
        marks.
        """
        first, last = True, list[int]()
        for tokens in self.undivided(parts):
            if first:
                yield [] if tokens[: len(self.begin)] == self.begin else self.begin
            first, last = False, [*last, *tokens][-max(1, len(self.end)) :]
            yield tokens
        if first:
            yield self.begin
        if last[-len(self.end) :] != self.end:
            yield self.end

    def undivided(self, parts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the tokens of a text that comes in parts, equal to those of the whole, without marks."""
        if not self._tokenizer.is_fast:  # the tokenizer does not report the location of tokens
            yield self._tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
            return
        window, begin = "", 0
        held: list[_Token] = []
        for part in parts:
            text = window[-_OVERLAP_CHARACTERS:] + part
            shift = begin + len(window) + len(part) - len(text)
            found = self._located(text, shift)
            joint = _joint(held, found) if window else (0, 0)
            if joint is None:  # they agree nowhere: use one window for both
                text, shift = window + part, begin
                found = self._located(text, shift)
                joint = _same_begin(held, found) if begin else (0, 0)
            done, begun = joint
            if window and done:
                yield [token for token, _, _ in held[:done]]
            held = found[begun:]
            window, begin = text, shift
        yield [token for token, _, _ in held]

    def _located(self, text: str, shift: int) -> list[_Token]:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = found["offset_mapping"]
        return [(t, first + shift, end + shift) for t, (first, end) in zip(found["input_ids"], places, strict=True)]

    def _border(self, text: str, border: int, tokens: Sequence[int], located: Sequence[_Token]) -> tuple[int, int]:
        """Return how many tokens lie before a character, and how many begin before it: one more if a token lies on both
        sides.
        """
        if border in (0, len(text)):
            count = len(tokens) if border else 0
            return count, count
        before = sum(end <= border for _, _, end in located)
        begun = sum(first < border for _, first, _ in located)
        met = any(end == border for _, _, end in located) and any(first == border for _, first, _ in located)
        if located and (before < begun or (before == begun and met)):
            return before, begun
        # next to a space that no token claims: compare with the tokens of the text up to there
        alone = self._tokenizer(text[:border], add_special_tokens=False)["input_ids"]
        same = zip(alone, tokens, strict=False)
        common = next((place for place, (a, b) in enumerate(same) if a != b), min(len(alone), len(tokens)))
        return common, common + (common < len(alone))

    def _marks(self) -> tuple[list[int], list[int]]:
        plain = self._tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        whole = self._tokenizer(_PROBE)["input_ids"]
        for begin in range(len(whole) - len(plain) + 1):
            if whole[begin : begin + len(plain)] == plain:
                return whole[:begin], whole[begin + len(plain) :]
        raise FinetuneError(
            f"the tokenizer makes tokens {whole} of {_PROBE!r} with its marks and {plain} without: its marks cannot "
            "be determined; use the tokenizer that came with the model"
        )


def _joint(held: Sequence[_Token], found: Sequence[_Token]) -> tuple[int, int] | None:
    """Return the place in both windows from which the tokens of the second replace those of the first; None if they
    agree nowhere.

    It is the middle of the longest run of tokens that they have in common. The run must cover most of the characters of
    both, because windows that group digits differently share shorter runs by chance.
    """
    places = {token: place for place, token in enumerate(held)}
    best, last, length, run, before = None, 0, 0, 0, -1
    for place, token in enumerate(found):
        there = places.get(token, -1)
        run = run + 1 if there >= 0 and there == before + 1 and run else int(there >= 0)
        before = there
        if run > length:
            best, last, length = (there - run // 2, place - run // 2), place, run
    if length < 2 * _AGREEING_TOKENS:
        return None
    both, common = held[-1][2] - found[0][1], found[last][2] - found[last - length + 1][1]
    return best if common >= _AGREEING_SHARE * both else None


def _same_begin(held: Sequence[_Token], found: Sequence[_Token]) -> tuple[int, int]:
    """Return the places from which the tokens of a wider window are used: where the held ones begin.

    Raises FinetuneError.
    """
    try:
        return 0, found.index(held[0])
    except ValueError as error:
        raise FinetuneError(
            f"a text cannot be divided for the tokenizer anywhere within {found[-1][2] - found[0][1]:,} characters; "
            "put line breaks into it"
        ) from error
