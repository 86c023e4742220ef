"""A step graph of a few storages without operators of a model, for tests of what moves and holds storages."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from port_agent.paging.pager import Pager
from port_agent.training.state.checkpoint import StateStore
from port_planner.ir.bundle.manifest import TensorLayout
from port_planner.ir.graph import Op, Phase, Ref, Role, StepGraph, Storage, Value
from port_planner.ir.program import Program

COUNT = 300_000
"""Numbers in each tensor: more than one chunk of the page file."""
KEYS = ("parameter/w", "state/m")


def graph() -> StepGraph:
    """Return a step in which op 0 makes t from w and op 1 adds it to m."""
    nbytes = 4 * COUNT
    storages = (
        Storage(nbytes, Role.PARAMETER, "w"),
        Storage(nbytes, Role.STATE, "m"),
        Storage(nbytes, Role.TEMPORARY, "t"),
    )
    values = tuple(Value(s, "float32", (COUNT,), (1,), 0) for s in range(3))
    ops = (
        Op("aten::mul.Tensor", (Ref(0), 2.0), (), (2,), (), Phase.FORWARD),
        Op("aten::add_.Tensor", (Ref(1), Ref(2)), (), (None,), (1,), Phase.UPDATE),
    )
    return StepGraph(storages, values, ops, (), 2)


PROGRAM = Program(
    graph=graph(), instructions=(), groups=(), slice_counts=(), slice_written=(), starts_on_flash=frozenset(),
    cross_step=frozenset(), replayed=frozenset(), peak_bytes=0, peak_op=0, seconds=0.0, compute_seconds=0.0,
    stall_seconds=0.0, joules=0.0, recompute_seconds=0.0, read_bytes=0, written_to=(0,),
    wear_joules=0.0,
)  # fmt: skip


def program(**changes: object) -> Program:
    """Return a program of `graph` that keeps everything, but for the changes."""
    return replace(PROGRAM, **changes)  # type: ignore[arg-type]


def numbers(first: float) -> torch.Tensor:
    """Return the contents of one tensor, none equal to another's."""
    return torch.arange(COUNT, dtype=torch.float32) + first


LAYOUTS = {key: TensorLayout("float32", (COUNT,), (1,)) for key in KEYS}


def store(folder: Path, pager: Pager) -> StateStore:
    """Return a store in which the first state is committed: w from 0, m from 0.5."""
    made = StateStore(folder, dict.fromkeys(KEYS, 4 * COUNT), pager, job="job")

    def contents(key: str) -> Iterable[torch.Tensor]:
        return numbers(0.5 * KEYS.index(key)).view(torch.uint8).split(1 << 20)

    made.create(contents, {})
    return made
