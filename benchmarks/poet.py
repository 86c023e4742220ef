"""Reads planning problems and writes schedules in the JSON format of POET's problems.

A problem file holds `T` nodes in execution order (runtime_s, ram_bytes, compute_J, pagein_J, pageout_J), `edges` and
`budgets`; a solution holds the T x T matrices R, SRam, SSd, Min, Mout, each as {"ij": [[t, i], ...]}.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from port_planner.base.errors import ExitCode, PortError
from port_planner.problem.problem import (
    GapDecision,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Stage,
    Tensor,
    verify_problem,
)
from port_planner.problem.replay import page_out_ready

MAX_NODES = 100_000
"""Far more than a step graph has; a larger number means a damaged file."""


class InstanceError(PortError):
    """Raised for a problem file that cannot be read; carries the path."""

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"cannot read the planning problem {path}: {reason}")


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem file: its id and the problem it states."""

    id: str
    problem: Problem


def read_instance(path: Path, semantics: Semantics = Semantics.POET) -> Instance:
    """Return the problem in the file at `path`, under POET's semantics or with real transfers and static power."""
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InstanceError(str(path), f"{error}; give a JSON file of the planning format") from error
    try:
        return parse_instance(data, path.stem, semantics)
    except InstanceError as error:
        raise InstanceError(str(path), error.reason) from None


def parse_instance(data: Any, name: str, semantics: Semantics = Semantics.POET) -> Instance:
    """Return the problem that a parsed file states; InstanceError says what is wrong with it."""
    if not isinstance(data, dict):
        raise InstanceError(name, "the top level is not an object")
    size = _number(data, "T", name, integer=True)
    nodes = data.get("nodes")
    if not isinstance(nodes, list) or not 1 <= size <= MAX_NODES or len(nodes) != size:
        count = len(nodes) if isinstance(nodes, list) else "no"
        raise InstanceError(name, f"T is {size}, but there are {count} nodes")
    predecessors = _read_edges(data, int(size), name)
    chip = data.get("chip")
    chip = chip if isinstance(chip, dict) else {}
    real = semantics is Semantics.REAL
    power = _number(chip, "MEMORY_POWER", name) if real and "MEMORY_POWER" in chip else 0.0
    stages, tensors = [], []
    for i, node in enumerate(nodes):
        if not isinstance(node, dict) or node.get("id", i) != i:
            raise InstanceError(name, f"node {i} is not an object with id {i}")
        stage, tensor = _read_node(node, i, predecessors, name, power)
        stages.append(stage)
        tensors.append(tensor)
    users: list[list[int]] = [[] for _ in range(int(size))]
    for v, inputs in enumerate(predecessors):
        for u in inputs:
            users[u].append(v)
    tensors = [replace(t, accesses=(i, *sorted(users[i]))) for i, t in enumerate(tensors)]
    ram, deadline = _read_budgets(data, name)
    problem = Problem(
        tuple(stages),
        tuple(tensors),
        ram,
        deadline,
        semantics,
        static_watts=_number(chip, "POWER", name) if real and "POWER" in chip else 0.0,
        name=name,
    )
    verify_problem(problem)
    return Instance(str(data.get("id", name)), problem)


def _read_budgets(data: dict[str, Any], name: str) -> tuple[int | None, float | None]:
    budgets = data.get("budgets") or {}
    if not isinstance(budgets, dict):
        raise InstanceError(name, "budgets is not an object")
    ram = None if budgets.get("ram_bytes") is None else math.floor(_number(budgets, "ram_bytes", name))
    deadline = None if budgets.get("runtime") is None else _number(budgets, "runtime", name)
    return ram, deadline


def _number(data: dict[str, Any], key: str, name: str, *, integer: bool = False) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InstanceError(name, f"{key} is {value!r}; it must be a finite number >= 0")
    if integer and value != int(value):
        raise InstanceError(name, f"{key} is {value!r}; it must be whole")
    return value


def _read_edges(data: dict[str, Any], size: int, name: str) -> list[list[int]]:
    """Return the distinct inputs of every node; duplicated edges (POET has them) count once."""
    edges = data.get("edges")
    if not isinstance(edges, list):
        raise InstanceError(name, "edges is not a list")
    inputs: list[set[int]] = [set() for _ in range(size)]
    for edge in edges:
        if not isinstance(edge, list) or len(edge) != 2 or not all(type(n) is int and 0 <= n < size for n in edge):
            raise InstanceError(name, f"edge {edge!r} does not name two nodes of 0..{size - 1}")
        u, v = edge
        if u >= v:
            raise InstanceError(
                name, f"edge {u} -> {v} points backwards: the graph is cyclic, or its nodes are not in execution order"
            )
        inputs[v].add(u)
    return [sorted(s) for s in inputs]


def _read_node(
    node: dict[str, Any], i: int, predecessors: list[list[int]], name: str, memory_watts: float
) -> tuple[Stage, Tensor]:
    where = f"{name}, node {i}"
    seconds = _number(node, "runtime_s" if "runtime_s" in node else "runtime_ms", where)
    joules, nbytes = _number(node, "compute_J", where), int(_number(node, "ram_bytes", where, integer=True))
    joules_in, joules_out = _number(node, "pagein_J", where), _number(node, "pageout_J", where)
    label = str(node.get("name", i))
    paging = Paging(
        0,
        seconds_out=joules_out / memory_watts if memory_watts else 0.0,
        seconds_in=joules_in / memory_watts if memory_watts else 0.0,
        joules_out=joules_out,
        joules_in=joules_in,
    )
    rematerialization = Rematerialization(seconds, joules, tuple((u, 0) for u in predecessors[i]))
    return Stage(label, seconds, joules), Tensor(label, nbytes, (i,), (i,), False, (rematerialization,), (paging,))


def solution_matrices(problem: Problem, schedule: Schedule) -> dict[str, dict[str, list[list[int]]]]:
    """Return `schedule` as POET's matrices R, SRam, SSd, Min, Mout, sparse."""
    size = problem.size
    recomputed = {(t, t) for t in range(size)}
    in_ram: set[tuple[int, int]] = set()
    on_flash: set[tuple[int, int]] = set()
    page_in: list[tuple[int, int]] = []
    chosen = {c.gap: c for c in schedule.choices if c.decision is not GapDecision.KEEP}
    for i, tensor in enumerate(problem.tensors):
        in_ram |= {(t, i) for t in tensor.accesses if t != tensor.birth}
    reads: dict[int, list[int]] = {}
    page_out: list[tuple[int, int]] = []
    for g, gap in enumerate(problem.gaps):
        choice = chosen.get(g)
        if gap.dead:
            continue
        if choice is None:
            in_ram |= {(t, gap.tensor) for t in range(gap.after + 1, gap.before)}
            continue
        in_ram |= {(t, gap.tensor) for t in range(choice.stage, gap.before)}
        if choice.decision is GapDecision.RECOMPUTE:
            recomputed.add((choice.stage, gap.tensor))
            in_ram.discard((choice.stage, gap.tensor))
        else:
            page_in.append((choice.stage - 1, gap.tensor))
            reads.setdefault(gap.tensor, []).append(g)
    recomputed |= {(s, i) for i, s in schedule.intermediates}
    for i, gaps in reads.items():
        first = problem.gaps[gaps[0]]
        rematerialized = next(
            (chosen[g].stage for g in problem.gaps_of[i] if g in chosen and problem.gaps[g].before == first.after),
            None,
        )
        out = first.after + (page_out_ready(problem, first, rematerialized) - first.after - 2)
        if (out, i) not in in_ram:
            out = first.after + 1
            in_ram.add((out, i))
        page_out.append((out, i))
        last = max(chosen[g].stage for g in gaps)
        on_flash |= {(t, i) for t in range(out + 1, last)}
    return {
        "R": _sparse(recomputed),
        "SRam": _sparse(in_ram),
        "SSd": _sparse(on_flash),
        "Min": _sparse(page_in),
        "Mout": _sparse(page_out),
    }


def _sparse(pairs: set[tuple[int, int]] | list[tuple[int, int]]) -> dict[str, list[list[int]]]:
    return {"ij": [[t, i] for t, i in sorted(set(pairs))]}


def write_solution(path: Path, problem: Problem, schedule: Schedule) -> None:
    """Write `schedule` to `path` in the checker's format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(solution_matrices(problem, schedule)))
