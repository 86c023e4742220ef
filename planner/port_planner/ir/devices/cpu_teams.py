"""Teams of CPU threads among which a step's operators may be divided: a thread count, on any core
or on one cluster's cores.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

MAX_TEAMS = 16
"""Largest number of teams in a bundle: thread counts, and clusters of a big.LITTLE CPU (at most three)."""
_MAX_THREADS = 1024
_MAX_CORES = 4096


@dataclass(frozen=True, slots=True)
class CpuTeam:
    """`threads` that compute an operator together; `cores`: the numbers of the cores on which they run, empty for any.

    All teams compute in the same memory. An operator's bits depend on the number of threads, but not on the cores.
    """

    threads: Annotated[int, msgspec.Meta(ge=1, le=_MAX_THREADS)]
    cores: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_CORES)], ...], msgspec.Meta(max_length=_MAX_CORES)
    ] = ()

    @property
    def text(self) -> str:
        """The team in words, such as `1 thread` or `4 threads on cores 4, 5, 6, 7`."""
        where = f" on cores {', '.join(map(str, self.cores))}" if self.cores else ""
        return f"{self.threads} thread{'' if self.threads == 1 else 's'}{where}"
