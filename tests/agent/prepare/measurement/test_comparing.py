"""Operators in tiles are compared within the budget: the same findings as with all the memory there is,
and no more than it says.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from port_agent.malloc import preload_environment
from port_planner.capture.step import capture_step
from port_planner.exactness.request import pack_request, read_differing
from port_planner.ir.graph import StepGraph
from port_planner.tiling.chains import find_chains
from port_planner.tiling.tiles import tile_chains

pytestmark = pytest.mark.process

BUDGET = 360 << 20
ROWS, WIDTH, ACTIVATIONS = 16384, 256, 5
"""An activation takes 16 MiB, and the backward pass wants twelve of them; both the whole's and the
tiles' are there in the end.
"""

PEAK = (
    "import sys; from pathlib import Path; from port_agent.prepare.measurement.comparing import compare;"
    "from port_planner.base.process_memory import peak_resident_bytes;"
    "print(compare(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])), peak_resident_bytes())"
)


def deep() -> StepGraph:
    layers = [layer for _ in range(ACTIVATIONS) for layer in (nn.GELU(), nn.Tanh())]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(
        model, lambda model, x: model(x).square().mean(), optimizer, (torch.randn(ROWS, WIDTH),)
    ).graphs["step"]


def compared(source: Path, target: Path, ram_bytes: int, page_dir: Path) -> tuple[bool, int]:
    """Return whether a comparison in a process of its own was followed, and that process's peak of resident bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(source), str(target), str(ram_bytes), str(page_dir)],
        capture_output=True,
        text=True,
        env={**preload_environment(None), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    followed, peak = done.stdout.split()
    return followed == "True", int(peak)


def test_the_process_keeps_to_the_budget_and_finds_the_same(tmp_path: Path) -> None:
    graph = deep()
    right = tile_chains(graph, find_chains(graph, 4 * ROWS * WIDTH), 4)
    gelu = next(i for i in right.replacements[0].new if right.graph.ops[i].name == "aten::gelu")
    ops = [replace(op, kwargs=(("approximate", "tanh"),)) if i == gelu else op for i, op in enumerate(right.graph.ops)]
    source, target = tmp_path / "pairs", tmp_path / "differing"
    wrong = replace(right, graph=replace(right.graph, ops=tuple(ops)))
    source.write_bytes(pack_request([(graph, right), (graph, wrong)], 1))
    followed, peak = compared(source, target, BUDGET, tmp_path)
    found = read_differing(target)
    assert found[0] == () and len(found[1]) == 1
    plain, unbounded = compared(source, target, 4 << 30, tmp_path)
    assert found == read_differing(target)
    assert (followed, plain) == (True, False)
    assert peak < BUDGET < unbounded, (peak, unbounded)
