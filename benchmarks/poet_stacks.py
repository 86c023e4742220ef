"""Planning problems of any size in POET's format: BERT stacks as POET builds them, residual nets with a true reverse.

    python -m benchmarks.planning --generate bert:62 --generate bert:187 --generate residual:70 --out DIR

`bert:N` has 16 N + 3 nodes, `residual:N` 14 N + 5.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.poet import parse_instance
from port_planner.base.errors import ExitCode, PortError
from port_planner.problem.problem import Schedule
from port_planner.problem.replay import replay


class KindError(PortError):
    """Raised for a kind of problem that cannot be generated here."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class Chip:
    """Rates of a processor and its flash: operations per second and per joule, bytes and
    seconds, watts of transfers.
    """

    name: str
    operations_per_s: float
    operations_per_j: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    read_latency_s: float
    write_latency_s: float
    memory_watts: float
    watts: float


A72 = Chip("a72", 2.0e9, 40_115_792.067, 45.5e6, 24.5e6, 5.09561e-6, 1.85314e-5, 0.15, 3.0)
"""The cost table of POET's Raspberry Pi 4 (its reference implementation, Apache-2.0)."""

M4 = Chip("m4", 6_369_910.145, 580_010_757.691, 4_616_510.0, 4_440_000.0, 1.09e-4, 1.13e-4, 0.33, 0.0109824)
"""POET's cost table of a Cortex-M4F."""

ATTENTION = (
    ("QueryKeyValueMatrix", 3 * 512 * 768 * 4, 905_969_664),
    ("QKTMatrix", 12 * 512 * 512 * 4, 207_618_048),
    ("QKTVMatrix", 512 * 768 * 4, 402_653_184),
    ("LinearLayer", 512 * 768 * 4, 1_181_952),
    ("SkipAddLayer", 512 * 768 * 4, 393_216),
    ("LinearLayerReLU", 4 * 512 * 768 * 4, 6_300_672),
    ("LinearLayer", 512 * 768 * 4, 4_720_896),
    ("SkipAddLayer", 512 * 768 * 4, 393_216),
)
"""One encoder block of BERT-base at 512 tokens: layer, bytes of its output, operations."""


class _Nodes:
    """Nodes and edges as they are appended."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[list[int]] = []

    def add(self, name: str, nbytes: int, operations: float, inputs: list[int]) -> int:
        chip, i = self.chip, len(self.nodes)
        self.nodes.append(
            {
                "id": i,
                "name": f"{name}{i}",
                "ram_bytes": nbytes,
                "compute_J": operations / chip.operations_per_j,
                "pagein_J": chip.memory_watts * (chip.read_latency_s + nbytes / chip.read_bytes_per_s),
                "pageout_J": chip.memory_watts * (chip.write_latency_s + nbytes / chip.write_bytes_per_s),
                "runtime_s": operations / chip.operations_per_s,
            }
        )
        self.edges += [[u, i] for u in sorted(set(inputs))]
        return i


def bert_stack(blocks: int, chip: Chip = A72) -> dict[str, Any]:
    """Return a stack of encoder blocks with the gradient chain that POET gives it, at 50 %
    RAM and 1.1 times the time.
    """
    made = _Nodes(chip)
    operations: list[float] = [0.0]
    last = made.add("Input", 512 * 768 * 4, 0.0, [])
    for _ in range(blocks):
        skip = last
        for name, nbytes, work in ATTENTION:
            last = made.add(name, nbytes, work, [last, skip] if name == "SkipAddLayer" else [last])
            operations.append(work)
            if name == "SkipAddLayer":
                skip = last - 1  # POET's second residual takes the attention's projection, not the first sum
    forward = len(made.nodes)
    gradient = made.add("CrossEntropyLoss", 2048, 201_326_592, [last])
    for i in reversed(range(forward)):
        nbytes = made.nodes[i + 1]["ram_bytes"]
        gradient = made.add("Gradient", nbytes, 2 * operations[i], [i, i + 1, gradient])
    return _budgeted(made, f"bert{blocks}", 0.5, 1.1)


def residual_net(blocks: int, chip: Chip = M4) -> dict[str, Any]:
    """Return a CIFAR residual net with its true reverse graph, at 50 % RAM and 1.2 times the time.

    One gradient per operand, sums of gradients at the skips. Batch norms read their input again, ReLUs their output,
    convolutions their input: outputs of batch norms and sums have no use in the backward pass, which POET's gradient
    chain hides.
    """
    made, channels, pixels = _Nodes(chip), 16, 32 * 32
    ops: list[tuple[int, list[int], float, str]] = []

    def op(kind: str, inputs: list[int]) -> int:
        size = channels * pixels
        work = {"conv": 18.0 * channels * size, "norm": 2.0 * size, "relu": 1.0 * size, "sum": 1.0 * size}[kind]
        i = made.add(kind, 4 * size, work, inputs)
        ops.append((i, inputs, work, kind))
        return i

    x = op("conv", [made.add("input", 4 * 3 * pixels, 3 * pixels, [])])
    for block in range(blocks):
        if block in (blocks // 3, 2 * blocks // 3):
            pixels, channels = pixels // 4, 2 * channels
        entry = x
        y = op("norm", [op("conv", [op("relu", [op("norm", [op("conv", [x])])])])])
        x = op("relu", [op("sum", [y, entry])])
    gradients = {x: made.add("d_loss", made.nodes[x]["ram_bytes"], 1000, [made.add("loss", 40, 1000, [x]), x])}
    for i, inputs, work, kind in reversed(ops):
        for u in inputs:
            gradient, nbytes = gradients[i], made.nodes[u]["ram_bytes"]
            if kind != "sum":
                saved = {"conv": [u], "norm": [u], "relu": [i]}[kind]
                gradient = made.add(f"d_{kind}", nbytes, 2 * work, [gradient, *saved])
            if gradients.get(u, gradient) != gradient:
                gradient = made.add("d_sum", nbytes, nbytes // 4, [gradients[u], gradient])
            gradients[u] = gradient
    return _budgeted(made, f"residual{blocks}", 0.5, 1.2)


def _budgeted(made: _Nodes, name: str, ram: float, time: float) -> dict[str, Any]:
    chip = made.chip
    data: dict[str, Any] = {
        "id": f"{name}__{chip.name}__ram{ram * 100:.0f}__rt{time * 100:.0f}",
        "T": len(made.nodes),
        "nodes": made.nodes,
        "edges": made.edges,
        "chip": {"MEMORY_POWER": chip.memory_watts, "POWER": chip.watts},
    }
    peak = replay(parse_instance(data, name).problem, Schedule()).peak_bytes
    data["nobudget_peak_bytes"] = peak
    data["total_runtime"] = sum(node["runtime_s"] for node in made.nodes)
    data["baseline_J"] = sum(node["compute_J"] for node in made.nodes)
    data["budgets"] = {"ram_bytes": int(ram * peak), "runtime": time * data["total_runtime"]}
    return data


def generate(text: str) -> dict[str, Any]:
    """Return the problem with a name such as bert:62 or residual:70."""
    kind, colon, count = text.partition(":")
    makers = {"bert": bert_stack, "residual": residual_net}
    if kind not in makers or not colon or not count.isdigit() or not 1 <= int(count) <= 1000:
        raise KindError(f"cannot generate {text!r}; write bert:N or residual:N with 1 to 1000 blocks")
    return makers[kind](int(count))
