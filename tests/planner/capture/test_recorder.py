"""Recording holds no activations."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


# -- memory


MEASURE = """
import sys, torch
sys.path.insert(0, {root!r})
from torch import nn
from torch.nn import functional
from planner.ir.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from planner.capture.step import capture_step
torch.set_num_threads(1)
def net(width, depth):
    return nn.Sequential(*[m for i in range(depth) for m in (nn.Conv2d(3 if i == 0 else width, width, 3, padding=1), nn.ReLU())], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))
def loss_fn(model, x, y):
    return functional.cross_entropy(model(x), y)
def one(width, size, depth):
    model = net(width, depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(2, 3, size, size), torch.randint(0, 4, (2,))
    if sys.argv[1] == "capture":
        capture_step(model, loss_fn, optimizer, data)
    else:
        loss_fn(model, *data).backward()
        optimizer.step()
one(4, 8, 2)
before = resident_bytes()
reset_peak()
one(16, 160, 16)
print(peak_resident_bytes() - before)
"""


def test_recording_holds_no_activations() -> None:
    grown = {}
    for what in ("capture", "eager"):
        command = [sys.executable, "-c", MEASURE.format(root=str(ROOT)), what]
        grown[what] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown["eager"] > 40 << 20  # 16 convolutions with ReLUs of 3.1 MiB each
    assert grown["capture"] < grown["eager"] / 2
