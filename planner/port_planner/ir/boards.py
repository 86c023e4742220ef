"""Read boards from shipped TOML files that name a source for every number.

The module also estimates costs for a board that is not available.
"""

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.costs import CostTable, DeviceCosts, Flash, MediumKind, OpCost
from port_planner.ir.graph import ITEM_BYTES, StepGraph, operands
from port_planner.operators import operator_of
from port_planner.operators.row import Cost

BOARDS = Path(__file__).parent / "board_files"
KINDS = ("published", "measured", "derived", "assumed")
REQUIRED = (
    "ram_bytes", "base_bytes", "flops_per_s", "memory_bytes_per_s", "static_watts", "compute_watts",
    "read_bytes_per_s", "write_bytes_per_s", "latency_s", "read_joules_per_byte", "write_joules_per_byte",
)  # fmt: skip
_WORDS = ("name", "title", "kind", "medium")
OP_OVERHEAD_S = 4e-6
"""Dispatch of one aten operator from a prepared call (measured on x86-64, torch 2.13)."""


class BoardError(PortError):
    """A board file is missing or incomplete."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class Number:
    """One figure of a board: value, unit, source and kind of source."""

    value: float
    unit: str
    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class Board:
    """A device as its file describes it.

    `medium`: kind of its flash; None if the file does not name it.
    """

    name: str
    title: str
    kind: str
    numbers: dict[str, Number]
    medium: MediumKind | None = None

    def __getitem__(self, key: str) -> float:
        return self.numbers[key].value

    def device(self, *, estimated: bool = True) -> DeviceCosts:
        """Return the costs that do not depend on the operator.

        Their name shows whether op costs will be estimates.
        """
        endurance = self.numbers.get("endurance_bytes")
        flash = Flash(
            "flash",
            self["read_bytes_per_s"],
            self["write_bytes_per_s"],
            self["latency_s"],
            self["read_joules_per_byte"],
            self["write_joules_per_byte"],
            endurance.value if endurance else None,
        )
        title = f"{self.title} (estimated)" if estimated else self.title
        return DeviceCosts(title, int(self["base_bytes"]), self["static_watts"], self["compute_watts"], flash)


def board_names() -> list[str]:
    """Return the names of the shipped boards."""
    return sorted(path.stem for path in BOARDS.glob("*.toml"))


_TRANSPOSED, _MASK = 6, 10
"""Arguments of `convolution` and of `convolution_backward`: whether it is transposed, and which gradients of input,
weight and bias are wanted.
"""

_HOW = "`port-agent profile` writes a whole one"


def load_board(name: str) -> Board:
    """Return a shipped board by name, or the board in the file at that path.

    Raises BoardError if there is none, or the file cannot be read.
    """
    path = BOARDS / f"{name}.toml"
    if not path.exists():
        path = Path(name)
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise BoardError(f"unknown board {name!r}; choose one of {', '.join(board_names())} or a file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BoardError(f"cannot read the board file {path}: {error}; {_HOW}") from error
    return parse_board(data, str(path))


def parse_board(data: dict[str, Any], where: str) -> Board:
    """Return the board in parsed TOML.

    Every number needs value, unit, kind and source.

    Raises BoardError, naming the faulty entry.
    """
    numbers = {}
    for key, entry in data.items():
        if key in _WORDS:
            continue
        if not isinstance(entry, dict) or set(entry) != {"value", "unit", "kind", "source"}:
            raise BoardError(f"{where}: {key} needs exactly value, unit, kind and source")
        value = entry["value"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise BoardError(f"{where}: {key} is {value!r}; it must be a finite number >= 0")
        if entry["kind"] not in KINDS or not str(entry["source"]).strip():
            raise BoardError(f"{where}: {key} needs a source and a kind of {', '.join(KINDS)}")
        numbers[key] = Number(float(value), str(entry["unit"]), entry["kind"], str(entry["source"]))
    missing = [key for key in REQUIRED if key not in numbers]
    if missing:
        raise BoardError(f"{where} lacks {', '.join(missing)}; {_HOW}")
    name, title, kind = (str(data.get(*pair)) for pair in (("name", where), ("title", where), ("kind", "linux")))
    return Board(name, title, kind, numbers, _medium(data.get("medium"), where))


def _medium(name: object, where: str) -> MediumKind | None:
    known = {kind.name.lower(): kind for kind in MediumKind}
    if name is None or name in known:
        return known.get(str(name))
    raise BoardError(f"{where}: medium is {name!r}; choose one of {', '.join(known)}")


def format_board(board: Board) -> str:
    """Return the TOML text of a board, in the format of the shipped files."""
    lines = [f'name = "{board.name}"', f'title = "{board.title}"', f'kind = "{board.kind}"']
    lines += [f'medium = "{board.medium.name.lower()}"', ""] if board.medium else [""]
    for key, n in board.numbers.items():
        lines += [f"[{key}]", f"value = {n.value!r}", f'unit = "{n.unit}"', f'kind = "{n.kind}"']
        lines += ['source = "' + n.source.replace("\\", "\\\\").replace('"', '\\"') + '"', ""]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one operator: floating-point operations and bytes moved.

    `dense` if arithmetic dominates.
    """

    flops: float
    nbytes: float
    dense: bool


def op_work(graph: StepGraph, index: int) -> Work:
    """Return the work of op `index`, computed from its shapes."""
    op, values = graph.ops[index], graph.values
    ins = list(operands(op))
    outs = [v for v in op.outputs if v is not None]
    nbytes = float(sum(math.prod(values[v].shape) * ITEM_BYTES[values[v].dtype] for v in (*ins, *outs)))
    shape = [values[v].shape for v in ins]
    known = operator_of(op.name)
    if known.cost is Cost.CONVOLUTION_BACKWARD and len(shape) >= 3:
        wanted = op.args[_MASK]
        halves = sum(w is True for w in wanted[:2]) if isinstance(wanted, tuple) else 2
        return Work(2.0 * halves * math.prod(shape[0]) * math.prod(shape[2][1:]), nbytes, True)
    if known.cost is Cost.CONVOLUTION and outs and len(shape) >= 2:
        positions = shape[0] if op.args[_TRANSPOSED] is True else values[outs[0]].shape
        return Work(2.0 * math.prod(positions) * math.prod(shape[1][1:]), nbytes, True)
    if known.factors is not None and outs:
        return Work(2.0 * math.prod(values[outs[0]].shape) * shape[known.factors[0]][-1], nbytes, True)
    if known.cost in (Cost.ATTENTION, Cost.ATTENTION_BACKWARD) and shape:
        length = shape[0][-2] if len(shape[0]) > 1 else 1
        factor = 10.0 if known.cost is Cost.ATTENTION_BACKWARD else 4.0
        return Work(factor * math.prod(shape[0]) * length, nbytes, True)
    return Work(nbytes / 4.0, nbytes, False)


def estimated_costs(graph: StepGraph, board: Board, measured: CostTable | None = None) -> CostTable:
    """Return estimated costs of `graph` on a board that is not available.

    With costs measured elsewhere, each op's seconds are scaled by the ratio of arithmetic rates (dense ops) or of
    memory bandwidths (all others), both as this graph shows them; the workspace stays. Without such costs, seconds come
    from the board's rates alone.
    """
    works = [op_work(graph, i) for i in range(len(graph.ops))]
    device = board.device()
    seconds = [
        max(w.flops / board["flops_per_s"] if w.dense else 0.0, w.nbytes / board["memory_bytes_per_s"]) + OP_OVERHEAD_S
        for w in works
    ]
    workspace = [0] * len(works)
    if measured is not None:
        workspace = [c.workspace_bytes for c in measured.ops]
        seconds = _scaled(works, seconds, measured)
        device = replace(device, base_bytes=measured.device.base_bytes, threads=measured.device.threads)
    watts = {True: board["compute_watts"], False: board["compute_watts"]}
    if "moving_watts" in board.numbers:
        watts[False] = board["moving_watts"]
    ops = [OpCost(s, b, s * watts[w.dense]) for s, b, w in zip(seconds, workspace, works, strict=True)]
    return CostTable(device, tuple(ops))


def _scaled(works: list[Work], modelled: list[float], measured: CostTable) -> list[float]:
    """Scale measured seconds so that their sum matches the board's rates.

    Dense ops and other ops each have their own factor.
    """
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for work, there, here in zip(works, modelled, measured.ops, strict=True):
        sums[work.dense][0] += there
        sums[work.dense][1] += here.seconds
    ratio = {dense: (there / here if here > 0 else 1.0) for dense, (there, here) in sums.items()}
    return [here.seconds * ratio[work.dense] for work, here in zip(works, measured.ops, strict=True)]
