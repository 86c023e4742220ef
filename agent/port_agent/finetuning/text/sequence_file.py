"""Token sequences in a file without a name: what is trained on may be larger than the memory, and is read a sequence at a time.

The process that has the tokenizer writes it, the one that trains reads it; both have it open, and it is gone with the last of them.
"""

import os
import pickle
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

from port_agent.finetuning.inputs.options import FinetuneError

IGNORED = -100
"""Label of a token that no loss is computed on (torch's `cross_entropy`)."""

TOKEN = "i"
"""32-bit integers: a token takes 4 bytes, not the 36 of a number of Python's."""

_PLACE, _SUM = "q", "I"
"""64-bit places in a file, 32-bit sums."""

_WRITTEN_BYTES = 1 << 20
"""Sequences are written so many at a time."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens and what each is to be predicted as, of one length. `source`: what an encoder reads beside them, if there is one.

    `label`: the number of that which is to be chosen for them all, None where tokens are predicted. `places`: of each token within its text,
    where several texts in one sequence do not see each other. `rejected`: the other answer of a pair, of the same length.
    """

    tokens: "array[int]"
    labels: "array[int]"
    source: "array[int] | None" = None
    label: int | None = None
    places: "array[int] | None" = None
    rejected: "TokenSequence | None" = None

    @property
    def learned(self) -> int:
        """How many tokens a loss is computed on, never the first, or 1 where a label or one of two answers is chosen."""
        if self.label is not None or self.rejected is not None:
            return 1
        return sum(label != IGNORED for label in self.labels[1:])


class SequenceFile:
    """A file without a name, closed with this object.

    Pickled it is a number: that of the descriptor by which a child inherits it, and by which parent and child open it once more each.
    """

    def __init__(self, descriptor: int, inherited: int | None = None) -> None:
        """Take an open file. `inherited`: the descriptor that it was opened by, where that is another."""
        self.descriptor = descriptor
        self._number = descriptor if inherited is None else inherited
        weakref.finalize(self, os.close, descriptor).atexit = False  # who uses it at the end still holds it

    @classmethod
    def beside(cls, path: Path) -> "SequenceFile":
        """Make one in the first directory above a path that is there. Raises FinetuneError where nothing can be written into it."""
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return cls(os.dup(file.fileno()))
        except OSError as error:
            raise FinetuneError(
                f"{folder}: {error.strerror}; tokens are kept there while they are trained on, give an --out where there is room"
            ) from error

    def __reduce__(self) -> tuple[Callable[[int], "SequenceFile"], tuple[int]]:
        return _opened_again, (self._number,)


def _opened_again(number: int) -> SequenceFile:
    return SequenceFile(os.dup(number), number)


@dataclass(frozen=True, slots=True)
class StoredSequences(Sequence[TokenSequence]):
    """Sequences in a file, in any order: where each begins, its bytes and their sum (CRC-32)."""

    file: SequenceFile = field(compare=False)
    begins: "array[int]"
    sizes: "array[int]"
    sums: "array[int]"

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, place: int) -> TokenSequence: ...
    @overload
    def __getitem__(self, place: slice) -> "StoredSequences": ...
    def __getitem__(self, place: int | slice) -> "TokenSequence | StoredSequences":
        """Read a sequence. Raises FinetuneError where it cannot be read, or other bytes than were written."""
        if isinstance(place, slice):
            return self.those(range(*place.indices(len(self))))
        try:
            found = os.pread(self.file.descriptor, self.sizes[place], self.begins[place])
        except OSError as error:
            raise FinetuneError(
                f"the file of the tokens cannot be read ({error.strerror}); check the medium that it is on"
            ) from error
        if zlib.crc32(found) != self.sums[place]:
            raise FinetuneError(
                "the file of the tokens holds other bytes than were written; check the medium that it is on"
            )
        sequence: TokenSequence = pickle.loads(found)  # our own process wrote it
        return sequence

    def those(self, places: Iterable[int]) -> "StoredSequences":
        """Return the sequences at some places, in their order."""
        chosen = list(places)
        return StoredSequences(
            self.file, *(array(of.typecode, (of[p] for p in chosen)) for of in (self.begins, self.sizes, self.sums))
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of sequences, in tokens; `learned` in all. `largest_token`: the greatest number of one, which a model must know."""

    tokens: int = 0
    learned: int = 0
    shortest: int = 0
    longest: int = 0
    longest_source: int = 0
    largest_token: int = 0

    def beside(self, sequence: TokenSequence) -> "Lengths":
        """Return those of one sequence more."""
        length, source = len(sequence.tokens), sequence.source or ()
        other = () if sequence.rejected is None else sequence.rejected.tokens
        return Lengths(
            self.tokens + length + len(other),
            self.learned + sequence.learned,
            min(self.shortest or length, length),
            max(self.longest, length),
            max(self.longest_source, len(source)),
            max(self.largest_token, *sequence.tokens, *source, *other),
        )


class SequenceWriter:
    """Writes sequences to the end of an empty file."""

    def __init__(self, file: SequenceFile) -> None:
        self.lengths = Lengths()
        """Of all that were added."""
        self._stored = StoredSequences(file, array(_PLACE), array(_PLACE), array(_SUM))
        self._waiting = bytearray()
        self._written = 0

    @property
    def count(self) -> int:
        """How many were added."""
        return len(self._stored)

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Write some more. Raises FinetuneError where there is no room."""
        for sequence in sequences:
            content = pickle.dumps(sequence, pickle.HIGHEST_PROTOCOL)
            self._stored.begins.append(self._written + len(self._waiting))
            self._stored.sizes.append(len(content))
            self._stored.sums.append(zlib.crc32(content))
            self.lengths = self.lengths.beside(sequence)
            self._waiting += content
            if len(self._waiting) >= _WRITTEN_BYTES:
                self._write()

    def end(self) -> StoredSequences:
        """Return all that were added. Raises FinetuneError where there is no room."""
        self._write()
        return self._stored

    def _write(self) -> None:
        try:
            while self._waiting:
                count = os.pwrite(self._stored.file.descriptor, self._waiting, self._written)
                self._written += count
                del self._waiting[:count]
        except OSError as error:
            raise FinetuneError(
                f"the tokens to train on cannot be written ({error.strerror} after {self._written} bytes); give an --out where there is room"
            ) from error
