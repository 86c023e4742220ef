"""Compare allocators on a real training step: peak memory, memory left behind, CPU time and page faults.

    python benchmarks/malloc.py [--json] [--steps N] [--model resnet50|resnet18]

Every row is a process of its own that trains the same network with the same numbers; only the environment differs.
Gradients are used and freed as soon as they are final, as the executor does it. "peak" and "left" (after the last step,
and "trim": after asking for what is free) are resident memory in MiB above what model and momentum need; CPU seconds
are user + system time of the process for the fastest step after the first, system seconds and faults (thousands of
minor page faults) the median of these. A budget is given as a percentage of the highest sum of live blocks. The last
column compares the trained weights with those of the first row. jemalloc and mimalloc appear where they are installed
(Debian: libjemalloc2, libmimalloc2.0).
"""

import argparse
import ctypes
import ctypes.util
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.tables import table_console
from port_agent.malloc import PreloadMode, active, preload_environment, preload_mode

if TYPE_CHECKING:  # the process that only starts others does without
    from torch import nn


@dataclass(frozen=True, slots=True)
class Measurement:
    """Report of one training process about itself."""

    peak_bytes: int
    left_bytes: int
    trimmed_bytes: int
    """Bytes left after asking for all free memory back: by our `trim()`, or by malloc_trim
    with the C library's malloc.
    """
    cpu_s_per_step: float
    system_s_per_step: float
    faults_per_step: int
    digest: str
    peak_live_bytes: int | None
    """Highest sum of live blocks in the process; None without our allocator."""


@dataclass(frozen=True, slots=True)
class Row:
    """One allocator of the table."""

    name: str
    measurement: Measurement
    equal: bool
    """Whether the trained weights equal the first row's to the bit."""


def main() -> None:
    """Run the benchmark, or, in a child process, one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--steps", type=int, default=6, help="training steps per allocator (default: %(default)s)")
    parser.add_argument("--model", choices=("resnet50", "resnet18"), default="resnet50")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(asdict(measure(arguments.model, arguments.steps))))
        return
    rows = list(run_all(arguments.model, arguments.steps))
    if arguments.json:
        print(json.dumps({"model": arguments.model, "steps": arguments.steps, "rows": [asdict(row) for row in rows]}))
    else:
        print_table(rows, arguments.model)


def run_all(model: str, steps: int) -> Iterator[Row]:
    """Yield one row for each allocator on this machine."""
    digest = None
    for name, variables in peers():
        measurement = run_one(model, steps, variables)
        digest = digest or measurement.digest
        yield Row(name, measurement, measurement.digest == digest)
    if preload_mode() is not PreloadMode.PRELOAD:
        return
    free = run_one(model, steps, preload_environment(None))
    yield Row("ours, no budget", free, free.digest == digest)
    for percent in (120, 110, 105, 100):
        budget = (free.peak_live_bytes or 0) * percent // 100
        tight = run_one(model, steps, preload_environment(budget))
        yield Row(f"ours, budget {percent} %", tight, tight.digest == digest)


def peers() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the other allocators that are installed, by name, with the variables that select them."""
    yield "glibc default", {}
    threshold = str(64 << 10)
    yield "glibc, mmap from 64 KiB", {"MALLOC_MMAP_THRESHOLD_": threshold, "MALLOC_TRIM_THRESHOLD_": threshold}
    jemalloc, mimalloc = ctypes.util.find_library("jemalloc"), ctypes.util.find_library("mimalloc")
    if jemalloc:
        yield "jemalloc", {"LD_PRELOAD": jemalloc}
        yield "jemalloc, decay 0", {"LD_PRELOAD": jemalloc, "MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0"}
    if mimalloc:
        yield "mimalloc", {"LD_PRELOAD": mimalloc}


def run_one(model: str, steps: int, variables: dict[str, str]) -> Measurement:
    """Return the measurement of a process with these variables."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, __file__, "--measure", "--model", model, "--steps", str(steps)]
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return Measurement(**json.loads(result.stdout))


def measure(model: str, steps: int) -> Measurement:
    """Train for `steps` steps in this process and return what it took."""
    step, state = training_step(model)
    base_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts a new VmHWM
    cpu, system, faults = [], [], []
    for _ in range(steps):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
        step()
        cpu.append(time.process_time() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        system.append(after.ru_stime - before.ru_stime)
        faults.append(after.ru_minflt - before.ru_minflt)
    allocator = active()
    peak_bytes, left_bytes = status_bytes("VmHWM") - base_bytes, status_bytes("VmRSS") - base_bytes
    if allocator:
        allocator.trim()
    else:
        ctypes.CDLL(None).malloc_trim(0)
    return Measurement(
        peak_bytes=peak_bytes,
        left_bytes=left_bytes,
        trimmed_bytes=status_bytes("VmRSS") - base_bytes,
        cpu_s_per_step=min(cpu[1:]),
        system_s_per_step=statistics.median(system[1:]),
        faults_per_step=int(statistics.median(faults[1:])),
        digest=state(),
        peak_live_bytes=allocator.stats().peak_live_bytes if allocator else None,
    )


def status_bytes(field: str) -> int:
    """Return a memory figure of this process as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) << 10


def training_step(model: str) -> tuple[Callable[[], None], Callable[[], str]]:
    """Return a function that trains one step and one that returns the digest of all weights and buffers."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = residual_network(model)
    size, batch = (160, 8) if model == "resnet50" else (32, 32)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 100, (batch,))
    momentum: dict[torch.Tensor, torch.Tensor] = {p: torch.zeros_like(p).fill_(0) for p in network.parameters()}

    def update(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        with torch.no_grad():
            velocity = momentum[parameter].mul_(0.9).add_(gradient)
            parameter.add_(velocity, alpha=-0.01)

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step() -> None:
        torch.nn.functional.cross_entropy(network(images), labels).backward()

    def state() -> str:
        digest = hashlib.sha256()
        for tensor in network.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    return step, state


def residual_network(model: str) -> "nn.Sequential":
    """Return ResNet-50 (He et al. 2015, table 1), or ResNet-18 in its CIFAR form."""
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, body: nn.Sequential, shortcut: nn.Module) -> None:
            super().__init__()
            self.body, self.shortcut, self.activation = body, shortcut, nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(self.body(x) + self.shortcut(x))

    def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, *, relu: bool = True) -> list[nn.Module]:
        layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]
        return [*layers, nn.ReLU(inplace=True)] if relu else layers

    def block(inputs: int, width: int, stride: int) -> tuple[Residual, int]:
        if model == "resnet50":
            outputs = 4 * width
            body = [*convolution(inputs, width, 1), *convolution(width, width, 3, stride)]
            body += convolution(width, outputs, 1, relu=False)
        else:
            outputs = width
            body = [*convolution(inputs, width, 3, stride), *convolution(width, width, 3, relu=False)]
        plain = inputs == outputs and stride == 1
        shortcut = nn.Identity() if plain else nn.Sequential(*convolution(inputs, outputs, 1, stride, relu=False))
        return Residual(nn.Sequential(*body), shortcut), outputs

    if model == "resnet50":
        depths, layers = (3, 4, 6, 3), [*convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    else:
        depths, layers = (2, 2, 2, 2), convolution(3, 64, 3)
    channels = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layer, channels = block(channels, 64 << stage, 2 if stage and not index else 1)
            layers.append(layer)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


def print_table(rows: list[Row], model: str) -> None:
    """Print the rows for people."""
    from rich.table import Table

    table = Table(title=f"{model}, one thread: resident memory above model and momentum; per step")
    table.add_column("allocator", no_wrap=True)
    for heading in ("peak", "left", "trim", "CPU s", "sys s", "faults", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        m = row.measurement
        table.add_row(
            row.name,
            f"{m.peak_bytes / 2**20:.0f}",
            f"{m.left_bytes / 2**20:.0f}",
            f"{m.trimmed_bytes / 2**20:.0f}",
            f"{m.cpu_s_per_step:.2f}",
            f"{m.system_s_per_step:.2f}",
            f"{m.faults_per_step / 1000:.0f}",
            "yes" if row.equal else "NO",
        )
    table_console().print(table)


if __name__ == "__main__":
    main()
