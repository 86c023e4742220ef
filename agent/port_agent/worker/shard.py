"""Which samples of a data set one of several boards trains.

No two boards train the same sample, and all boards together train every one.
"""

import re
from dataclasses import dataclass
from typing import Self

_TEXT = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` (from 1) of `count`: of every `count` samples in a row, the `number`-th."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a shard such as 2/3; raises ValueError for anything else."""
        found = _TEXT.fullmatch(text)
        if found is None or int(found[1]) > int(found[2]):
            raise ValueError(f"{text!r} is not a valid shard; write it as 2/3: the second of three")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"
