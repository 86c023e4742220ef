"""The race: the schemes with the largest sums of measured gains are themselves trained, and the
one that measures best wins.

Measured gains are noisy and do not quite add up, so the knapsack's best few answers race against last-k schemes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from port_planner.mcu.autodiff import SparseScheme, last_layers
from port_planner.mcu.ir import UNDIVIDED, Graph, row_bytes
from port_planner.mcu.schemes.contributions import (
    DRAWS,
    ContributionTable,
    Limits,
    Measure,
    Needs,
    backward_macs,
    choice_problem,
)
from port_planner.sparse.choose import choose_best

ROUNDS = 3
"""Rounds: each halves the field and doubles the draws."""

RUNNERS_UP = 3
"""Answers of the knapsack that enter: this many for the gains as measured, and as many for optimistic ones."""

MAX_FINALISTS = 2 * (2 * RUNNERS_UP + 2)


@dataclass(frozen=True, slots=True)
class Finalist:
    """A scheme of the race: how it was found, what it needs, and its accuracies, one for each
    draw that it took part in.
    """

    origin: str
    scheme: SparseScheme
    predicted: float
    ram_bytes: int
    backward_macs: int
    accuracies: tuple[float, ...] = ()

    @property
    def measured(self) -> float:
        """The mean accuracy over the draws."""
        return float(np.mean(self.accuracies))


def find_finalists(
    graph: Graph, table: ContributionTable, limits: Limits, *, q88: bool = False, simd: bool = True
) -> tuple[Finalist, ...]:
    """Return the distinct schemes within the limits that are worth measuring.

    These are the knapsack's best answers with different layers, for measured and for optimistic gains, and
    the deepest last-k schemes, with their own biases and with all. Each of them also enters with the bytes
    filled that it leaves free.
    """
    needs = Needs(graph, limits, q88, simd)
    candidates = []
    for origin, gains in (("knapsack", table), ("knapsack, optimistic", table.optimistic())):
        candidates += [(origin, scheme) for scheme in _runners_up(gains, needs)]
    depth = len(graph.weighted())
    for origin, biases in (("last {}", None), ("last {}, all biases", depth)):
        schemes = {k: last_layers(graph, k, biases=biases) for k in range(1, depth + 1)}
        deepest = max((k for k, scheme in schemes.items() if needs.fits(scheme)), default=None)
        if deepest is not None:
            candidates.append((origin.format(deepest), schemes[deepest]))
    candidates += [(f"{origin}, filled", _filled(graph, table, scheme, needs)) for origin, scheme in candidates]
    found: dict[str, Finalist] = {}
    for origin, scheme in candidates:
        predicted, ram_bytes = table.predict(graph, scheme), int(needs.ram(scheme))
        finalist = Finalist(origin, scheme, predicted, ram_bytes, backward_macs(graph, scheme))
        found.setdefault(scheme.describe(), finalist)
    return tuple(found.values())


def _runners_up(table: ContributionTable, needs: Needs) -> list[SparseScheme]:
    """Return the knapsack's best answers, one for each set of layers whose weights are trained."""
    problem, scheme_of = choice_problem(table, needs)
    distinct: dict[frozenset[str], SparseScheme] = {}
    for choice in choose_best(problem, 16 * RUNNERS_UP):
        scheme = scheme_of(choice.selection)
        distinct.setdefault(frozenset(name for name, update in scheme.updates.items() if update.rows), scheme)
    return list(distinct.values())[:RUNNERS_UP]


def _filled(graph: Graph, table: ContributionTable, scheme: SparseScheme, needs: Needs) -> SparseScheme:
    """Return the scheme with more channels of the layers that gain, as many as fit; those with the most
    gain per byte come first.
    """
    best = (max(choices, key=lambda c: c.gain) for choices in table.by_layer.values())
    gaining = sorted((c for c in best if c.gain > 0), key=lambda c: -c.gain / (c.rows * row_bytes(graph.op(c.layer))))
    for contribution in gaining:
        now, op = scheme.of(contribution.layer), graph.op(contribution.layer)
        smallest = op.rows if op.kind in UNDIVIDED else 1
        for rows in range(contribution.rows, max(now.rows, smallest - 1), -1):
            updates = {**scheme.updates, op.name: replace(now, rows=rows)}
            larger = SparseScheme({o.name: updates[o.name] for o in graph.weighted() if o.name in updates})
            if needs.fits(larger):
                scheme = larger
                break
    return scheme


def race(
    field: Sequence[Finalist], measure: Measure, *, draws: int = DRAWS, rounds: int = ROUNDS
) -> tuple[Finalist, ...]:
    """Return the finalists with their measured accuracies, the winner first (successive halving, arXiv 1502.07943).

    All are measured on the same draws; the better half stays and is measured on as many again. The winner's accuracy is
    the best of several, so it is slightly higher than the scheme would reach on new draws.
    """
    ranking: list[Finalist] = []
    start, stop = 0, draws
    for left in reversed(range(rounds)):
        measured = [replace(f, accuracies=(*f.accuracies, *measure(f.scheme, range(start, stop)))) for f in field]
        measured.sort(key=lambda finalist: -finalist.measured)
        field = measured[: -(-len(measured) // 2)] if left else []
        ranking = [*measured[len(field) :], *ranking]
        start, stop = stop, 2 * stop
    return tuple(ranking)


def race_draws(count: int, draws: int = DRAWS, rounds: int = ROUNDS) -> int:
    """Return how many adaptations `race` measures for `count` finalists."""
    total, start, stop = 0, 0, draws
    for _ in range(rounds):
        total, count = total + count * (stop - start), -(-count // 2)
        start, stop = stop, 2 * stop
    return total
