"""Teams of threads of the CPU that operators of a step may be divided among: so many, on any core or on the cores of one cluster."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

MAX_TEAMS = 16
"""Of a bundle: numbers of threads, and clusters of a big.LITTLE CPU, of which there are three at most."""
_MAX_THREADS = 1024
_MAX_CORES = 4096


@dataclass(frozen=True, slots=True)
class CpuTeam:
    """`threads` that compute an operator together; `cores`: the numbers of those they run on, none: on any.

    All teams compute in the same memory. The number of threads belongs to an operator's bits, the cores do not.
    """

    threads: Annotated[int, msgspec.Meta(ge=1, le=_MAX_THREADS)]
    cores: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_CORES)], ...], msgspec.Meta(max_length=_MAX_CORES)
    ] = ()

    @property
    def text(self) -> str:
        """Such as `1 thread` or `4 threads on cores 4, 5, 6, 7`."""
        where = f" on cores {', '.join(map(str, self.cores))}" if self.cores else ""
        return f"{self.threads} thread{'' if self.threads == 1 else 's'}{where}"
