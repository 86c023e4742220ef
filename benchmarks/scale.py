"""Planning problems of any size in POET's format: BERT stacks as POET builds them, residual nets with a true reverse.

    python -m benchmarks.planning --generate bert:62 --generate bert:187 --generate residual:70 --out DIR

`bert:N` has 16 N + 3 nodes, `residual:N` 14 N + 5.
"""

from dataclasses import dataclass
from typing import Any

from planner.errors import PortError
from planner.poet import parse_instance
from planner.problem import Schedule
from planner.problem_replay import replay


class KindError(PortError):
    """A kind of problem that nothing here generates."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Chip:
    """Rates of a processor and its flash: operations per second and per joule, bytes and seconds, watts of transfers."""

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
"""Its cost table of a Cortex-M4F."""

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
                "id": i, "name": f"{name}{i}", "ram_bytes": nbytes, "compute_J": operations / chip.operations_per_j,
                "pagein_J": chip.memory_watts * (chip.read_latency_s + nbytes / chip.read_bytes_per_s),
                "pageout_J": chip.memory_watts * (chip.write_latency_s + nbytes / chip.write_bytes_per_s),
                "runtime_s": operations / chip.operations_per_s,
            }
        )  # fmt: skip
        self.edges += [[u, i] for u in sorted(set(inputs))]
        return i


def bert_stack(blocks: int, chip: Chip = A72) -> dict[str, Any]:
    """Return a stack of encoder blocks with the gradient chain that POET gives it, at 50 % RAM and 1.1 times the time."""
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

    Batch norms read the convolution's output again, ReLUs and convolutions their own output and input: the outputs of
    batch norms and sums have no use in the backward pass, which POET's gradient chain hides.
    """
    made = _Nodes(chip)
    widths = [(16, 32), (32, 16), (64, 8)]
    x = made.add("input", 3 * 32 * 32 * 4, 3 * 32 * 32, [])
    x = made.add("stem", 16 * 32 * 32 * 4, 2 * 9 * 3 * 16 * 32 * 32, [x])
    saved = []
    for block in range(blocks):
        width, side = widths[min(3 * block // blocks, 2)]
        size, dense = width * side * side, 2 * 9 * width * width * side * side
        entry = x
        conv1 = made.add("conv", 4 * size, dense, [entry])
        norm1 = made.add("norm", 4 * size, 8 * size, [conv1])
        relu1 = made.add("relu", 4 * size, size, [norm1])
        conv2 = made.add("conv", 4 * size, dense, [relu1])
        norm2 = made.add("norm", 4 * size, 8 * size, [conv2])
        total = made.add("sum", 4 * size, size, [norm2, entry])
        x = made.add("relu", 4 * size, size, [total])
        saved.append((entry, conv1, relu1, conv2, x, size, dense))
    gradient = made.add("loss", 4 * 64 * 8 * 8, 64 * 8 * 8 * 4, [x])
    for entry, conv1, relu1, conv2, out, size, dense in reversed(saved):
        out_gradient = made.add("d_relu", 4 * size, size, [gradient, out])
        g = made.add("d_norm", 4 * size, 16 * size, [out_gradient, conv2])
        g = made.add("d_conv", 4 * size, 2 * dense, [g, relu1])
        g = made.add("d_relu", 4 * size, size, [g, relu1])
        g = made.add("d_norm", 4 * size, 16 * size, [g, conv1])
        g = made.add("d_conv", 4 * size, 2 * dense, [g, entry])
        gradient = made.add("d_sum", 4 * size, size, [g, out_gradient])
    made.add("d_stem", 16 * 3 * 9 * 4, 4 * 9 * 3 * 16 * 32 * 32, [gradient, 0])
    made.add("update", 16 * 3 * 9 * 4, 16 * 3 * 9, [len(made.nodes) - 1])
    return _budgeted(made, f"residual{blocks}", 0.5, 1.2)


def _budgeted(made: _Nodes, name: str, ram: float, time: float) -> dict[str, Any]:
    chip = made.chip
    data: dict[str, Any] = {
        "id": f"{name}__{chip.name}__ram{ram * 100:.0f}__rt{time * 100:.0f}",
        "T": len(made.nodes), "nodes": made.nodes, "edges": made.edges,
        "chip": {"MEMORY_POWER": chip.memory_watts, "POWER": chip.watts},
    }  # fmt: skip
    peak = replay(parse_instance(data, name).problem, Schedule()).peak_bytes
    data["nobudget_peak_bytes"] = peak
    data["total_runtime"] = sum(node["runtime_s"] for node in made.nodes)
    data["baseline_J"] = sum(node["compute_J"] for node in made.nodes)
    data["budgets"] = {"ram_bytes": int(ram * peak), "runtime": time * data["total_runtime"]}
    return data


def generate(text: str) -> dict[str, Any]:
    """Return the problem that `text` such as bert:62 or residual:70 names."""
    kind, colon, count = text.partition(":")
    makers = {"bert": bert_stack, "residual": residual_net}
    if kind not in makers or not colon or not count.isdigit() or not 1 <= int(count) <= 1000:
        raise KindError(f"cannot generate {text!r}; write bert:N or residual:N with 1 to 1000 blocks")
    return makers[kind](int(count))
