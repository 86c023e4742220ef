"""How simultaneous workers share what the policy grants: pure rules over figures."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from port_agent.supervisor.job.board_places import THIS_COMPUTER

BOARD_WORKER_BYTES = 96 << 20
"""Assumed memory in bytes of a board's worker until it reports: interpreter, numpy and its samples."""
_BOARD_CPU_SHARE = 0.1
"""CPU share of a limited grant for each board, whose worker mostly waits for the serial line."""
_ALL_BOARDS_CPU_SHARE = 0.5
_MAX_RANKS = 6
"""Each rank doubles a weight; the kernel accepts weights up to 10,000."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that runs or could run."""

    job_id: int
    place: str
    priority: int


@dataclass(frozen=True, slots=True)
class CpuShare:
    """`share` of the granted CPUs; `rank` counts the lower priorities, each of which has half the weight."""

    share: float = 1.0
    rank: int = 0


def admit(line: Iterable[Claim], least_bytes: Callable[[Claim], float], memory_bytes: int | None) -> dict[str, Claim]:
    """Return which job gets which place: in order, as long as the memory suffices for the least that each needs."""
    left = math.inf if memory_bytes is None else float(memory_bytes)
    admitted: dict[str, Claim] = {}
    for claim in line:
        if claim.place in admitted:
            continue
        least = least_bytes(claim)
        if math.isfinite(least) and least <= left:
            admitted[claim.place] = claim
            left -= least
    return admitted


def cpu_shares(admitted: Mapping[str, Claim], cpu_percent: float) -> dict[str, CpuShare]:
    """Return the CPU share of each place; without a limit, the weights decide."""
    priorities = sorted({claim.priority for claim in admitted.values()})
    boards = sum(1 for place in admitted if place != THIS_COMPUTER)
    if cpu_percent >= 100 or len(admitted) < 2:
        a_board = rest = 1.0
    elif THIS_COMPUTER in admitted:
        a_board = min(_BOARD_CPU_SHARE, _ALL_BOARDS_CPU_SHARE / boards)
        rest = 1.0 - boards * a_board
    else:
        a_board, rest = 1.0 / boards, 1.0
    return {
        place: CpuShare(rest if place == THIS_COMPUTER else a_board, min(_MAX_RANKS, priorities.index(claim.priority)))
        for place, claim in admitted.items()
    }
