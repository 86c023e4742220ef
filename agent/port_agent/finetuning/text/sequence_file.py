"""Token sequences in an unnamed file: training data may be larger than memory, and is read a sequence at a time.

The tokenizer's process writes it and the training process reads it. Both have it open, and it disappears
when the last of them ends.
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
"""Label of a token that is excluded from the loss (torch's `cross_entropy`)."""

TOKEN = "i"
"""Type of a token, a 32-bit integer: 4 bytes instead of the 36 of a Python number."""

_PLACE, _SUM = "q", "I"
"""Types of a 64-bit offset in a file and of a 32-bit checksum."""

_WRITTEN_BYTES = 1 << 20
"""Size in bytes of the chunks in which sequences are written."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens and their labels, of one length. `source`: the encoder's input, if there is an encoder.

    `label`: index of the label to choose for the whole text, None if tokens are predicted. `places`: position of each
    token within its text, if several texts in one sequence are masked from each other. `rejected`: the other answer of
    a pair, of the same length.
    """

    tokens: "array[int]"
    labels: "array[int]"
    source: "array[int] | None" = None
    label: int | None = None
    places: "array[int] | None" = None
    rejected: "TokenSequence | None" = None

    @property
    def learned(self) -> int:
        """The number of tokens in the loss, never counting the first; 1 if a label or one of two answers is chosen."""
        if self.label is not None or self.rejected is not None:
            return 1
        return sum(label != IGNORED for label in self.labels[1:])


class SequenceFile:
    """An unnamed file, closed with this object.

    It is pickled as the number of the descriptor that a child inherits; parent and child each open it
    again through that descriptor.
    """

    def __init__(self, descriptor: int, inherited: int | None = None) -> None:
        """Take an open file. `inherited`: the descriptor by which it was opened, if that is another one."""
        self.descriptor = descriptor
        self._number = descriptor if inherited is None else inherited
        weakref.finalize(self, os.close, descriptor).atexit = False  # the interpreter may still need it at exit

    @classmethod
    def beside(cls, path: Path) -> "SequenceFile":
        """Create a file in the first existing directory above a path. Raises FinetuneError if it cannot be written."""
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return cls(os.dup(file.fileno()))
        except OSError as error:
            raise FinetuneError(
                f"{folder}: {error.strerror}; tokens are stored there during training; give an --out with enough free "
                "space"
            ) from error

    def __reduce__(self) -> tuple[Callable[[int], "SequenceFile"], tuple[int]]:
        return _opened_again, (self._number,)


def _opened_again(number: int) -> SequenceFile:
    return SequenceFile(os.dup(number), number)


@dataclass(frozen=True, slots=True)
class StoredSequences(Sequence[TokenSequence]):
    """Sequences in a file, in any order: the offset of each, its length in bytes and its checksum (CRC-32)."""

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
        """Read a sequence. Raises FinetuneError if it cannot be read, or its bytes have changed."""
        if isinstance(place, slice):
            return self.those(range(*place.indices(len(self))))
        try:
            found = os.pread(self.file.descriptor, self.sizes[place], self.begins[place])
        except OSError as error:
            raise FinetuneError(
                f"the file of tokens cannot be read ({error.strerror}); check its disk or card"
            ) from error
        if zlib.crc32(found) != self.sums[place]:
            raise FinetuneError(
                "the file of tokens no longer holds the bytes that were written; check its disk or card"
            )
        sequence: TokenSequence = pickle.loads(found)  # written by our own process
        return sequence

    def those(self, places: Iterable[int]) -> "StoredSequences":
        """Return the sequences with the given indices, in the order of these indices."""
        chosen = list(places)
        return StoredSequences(
            self.file, *(array(of.typecode, (of[p] for p in chosen)) for of in (self.begins, self.sizes, self.sums))
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of sequences in tokens; `learned`: total. `largest_token`: the largest token number, which a model must
    know.
    """

    tokens: int = 0
    learned: int = 0
    shortest: int = 0
    longest: int = 0
    longest_source: int = 0
    largest_token: int = 0

    def beside(self, sequence: TokenSequence) -> "Lengths":
        """Return the lengths with one more sequence."""
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
    """Appends sequences to an empty file."""

    def __init__(self, file: SequenceFile) -> None:
        self.lengths = Lengths()
        """Lengths of all added sequences."""
        self._stored = StoredSequences(file, array(_PLACE), array(_PLACE), array(_SUM))
        self._waiting = bytearray()
        self._written = 0

    @property
    def count(self) -> int:
        """The number of added sequences."""
        return len(self._stored)

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Add sequences. Raises FinetuneError if there is no space."""
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
        """Return all added sequences. Raises FinetuneError if there is no space."""
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
                f"the tokens to train on cannot be written ({error.strerror} after {self._written} bytes); give an "
                "--out with enough free space"
            ) from error
