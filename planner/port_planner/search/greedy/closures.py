"""What rematerializations need besides resident tensors: at each stage, the closure of the
tensors that are restored there.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from port_planner.problem.problem import Choice, GapDecision, Problem
from port_planner.search.greedy.decisions import Decisions

MAX_CHAIN = 24
"""Largest number of intermediates of a rematerialization; one that needs more is left to the solver."""

Versions = Mapping[int, int]
"""Tensor -> version."""


class ClosureCost(NamedTuple):
    """What intermediates cost together, and the bytes they hold while their stage's rematerializations run."""

    joules: float
    seconds: float
    nbytes: float


class Closures:
    """For each stage, the tensors that are restored there (`roots`), and what computing them needs."""

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self.problem, self.decisions = problem, decisions
        self.chain_limit = MAX_CHAIN
        self.roots: dict[int, dict[int, int]] = defaultdict(dict)
        """Stage -> tensors that are restored there by a rematerialization, with their versions."""
        self.intermediates: dict[int, Versions] = defaultdict(dict)
        """Stage -> tensors that are computed there only for the rematerializations of others, with versions."""
        self.reads: dict[int, set[int]] = defaultdict(set)
        """Stage -> tensors that its rematerializations read while they are resident."""
        self.read_at: dict[int, set[int]] = defaultdict(set)
        """Tensor -> stages whose rematerializations read it."""

    def find(self, stage: int, roots: Versions) -> tuple[Versions, set[int]] | None:
        """Return the intermediates that rematerializing `roots` before `stage` needs, and the
        resident tensors that it reads.

        None if it is impossible.
        """
        tensors, resident = self.problem.tensors, self.decisions.resident
        found: dict[int, int] = {}
        reads: set[int] = set()
        stack = list(roots.items())
        while stack:
            i, version = stack.pop()
            rematerialization = tensors[i].rematerialization(version)
            if rematerialization is None:
                return None
            for u, v in rematerialization.inputs:
                if u in roots or u in found:
                    if roots.get(u, found.get(u)) != v:
                        return None
                elif resident(u, v, stage):
                    reads.add(u)
                else:
                    g = self.problem.gap_at(u, stage)
                    if g is None or self.problem.gaps[g].version != v or len(found) >= self.chain_limit:
                        return None
                    found[u] = v
                    stack.append((u, v))
        return found, reads

    def cost(self, intermediates: Versions) -> ClosureCost:
        """Return the cost of a set of intermediates."""
        joules = seconds = nbytes = 0.0
        for i, v in intermediates.items():
            rematerialization = self.problem.tensors[i].rematerialization(v)
            if rematerialization is not None:
                joules += rematerialization.joules
                seconds += rematerialization.seconds
                nbytes += self.problem.tensors[i].nbytes
        return ClosureCost(joules, seconds, nbytes)

    def change(self, stage: int, intermediates: Versions) -> ClosureCost:
        """Return how much more other intermediates at a stage cost than the current ones."""
        new, old = self.cost(intermediates), self.cost(self.intermediates[stage])
        return ClosureCost(new.joules - old.joules, new.seconds - old.seconds, new.nbytes - old.nbytes)

    def readers(self, g: int) -> list[int]:
        """Return the stages whose rematerializations read the gap's tensor in the gap, on the gap's time line."""
        tensor = self.problem.gaps[g].tensor
        if not self.read_at[tensor]:
            return []
        there = (s for s in self.read_at[tensor] if self.problem.gap_at(tensor, s) == g)
        return sorted(self.decisions.unrolled(g, s) for s in there)

    def without(self, g: int, stage: int, readers: list[int]) -> dict[int, Versions] | None:
        """Return new closures of the stages that read the gap's tensor while it will be gone until `stage`.

        None if one of them could not be computed without it.
        """
        tensor = self.problem.gaps[g].tensor
        closures: dict[int, Versions] = {}
        missing = [reader % self.problem.size for reader in readers if reader < stage]
        if not missing:
            return closures
        with self.decisions.supposing(Choice(g, stage, GapDecision.RECOMPUTE)):
            for s in missing:
                found = self.find(s, self.roots[s])
                if found is None or tensor not in found[0]:
                    return None
                closures[s] = found[0]
        return closures

    def refresh(self, stage: int) -> float:
        """Find the intermediates of a stage again after its roots or residents have changed;
        return the additional bytes.
        """
        found = self.find(stage, self.roots[stage]) if self.roots[stage] else ({}, set())
        if found is None:
            found = (self.intermediates[stage], self.reads[stage])
        for u in self.reads[stage] - found[1]:
            self.read_at[u].discard(stage)
        for u in found[1]:
            self.read_at[u].add(stage)
        added = self.change(stage, found[0]).nbytes
        self.intermediates[stage], self.reads[stage] = found
        return added
