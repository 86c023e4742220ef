#!/usr/bin/env python3
"""Train tiny models with plain PyTorch and with PORT agent, and say whether the numbers are the same: `make check-arm`
does so on an emulated Arm.

`against_plain.py exec|mapped|bundle|finetune`; `against_plain.py bundle FILE` takes a bundle of the small
job that is there already.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
JOB = SOURCE / "tests/systemd/tiny_job.py"
RAM = "1G"
STEPS = 4
SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    images, labels = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
half = torch.randn(16, 32).bfloat16() @ torch.randn(32, 16).bfloat16()
print(half.float().sum().item().hex(), *(p.double().sum().item().hex() for p in model.parameters()))
"""
"""Convolutions, products and an optimizer, then a product in bfloat16."""

MAPPED = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file

file = Path(sys.argv[1])
if not file.exists():
    save_file({f"{layer}": torch.randn(512, 512) / 23 for layer in range(4)}, file)
torch.manual_seed(0)
weights = load_file(file)
bias = [torch.zeros(512, requires_grad=True) for _ in weights]
optimizer = torch.optim.AdamW(bias, lr=1e-2)
for step in range(3):
    hidden = torch.randn(8, 512)
    for layer, added in enumerate(bias):
        hidden = torch.tanh(hidden @ weights[str(layer)] + added)
    loss = hidden.square().mean()
    loss.backward()
    optimizer.step()
    weights[str(step)][:16] += 1
    print(step, loss.item().hex())
print(*(t.double().sum().item().hex() for t in (*bias, *weights.values())))
"""
"""Frozen weights that are mapped from their file, of which some pages are written."""

LEFT_ALONE = """
import sys
from pathlib import Path
from port_agent.finetuning.inputs.options import FinetuneOptions
from tests.agent.finetuning.left_alone import trained_alone
from tests.agent.finetuning.quantized.test_widened import in_float32
from tests.agent.finetuning.tiny_model import make_data, make_model

folder = Path(sys.argv[1])
model, data = make_model(folder / "model"), make_data(folder / "data.jsonl")
trained_alone(FinetuneOptions(str(in_float32(model)), (str(data),), str(folder / "plain"), sequence_tokens=32, updates=2, held_out=0.0))
"""
"""A tiny Llama in 16 bits, and the recipe of `finetune` in one process, over the same model loaded in
float32, without a budget.
"""


def printed(*command: str) -> str:
    """Return what Python prints for a command; its complaints go on to ours. Raises CalledProcessError."""
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True, cwd=SOURCE).stdout


def port_agent(*command: str) -> str:
    """Return what the command line prints."""
    return printed("-m", "port_agent.cli", *command)


def followed(folder: Path) -> tuple[object, object]:
    """Return what a script prints alone, and through `exec`."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return printed(str(script)), port_agent("exec", "--ram", RAM, "--page-dir", str(folder), "--", str(script))


def mapped(folder: Path) -> tuple[object, object]:
    """Return what a script over mapped weights prints alone, and with room for half of them."""
    script, weights = folder / "script.py", str(folder / "weights.safetensors")
    script.write_text(MAPPED)
    alone = printed(str(script), weights)
    return alone, port_agent("exec", "--tensors", "2M", "--page-dir", str(folder), "--", str(script), weights)


def planned(folder: Path) -> tuple[object, object]:
    """Return losses and the checksum of everything trained, of plain PyTorch and of a bundle that is planned first."""
    bundle = folder / "tiny.port"
    port_agent("plan", str(JOB), "--ram", RAM, "--strategy", "greedy", "--page-dir", str(folder), "-o", str(bundle))
    return bundled(bundle, folder)


def bundled(bundle: Path, folder: Path) -> tuple[object, object]:
    """Return losses and the checksum of everything trained, of plain PyTorch and of a bundle."""
    told = port_agent("train", str(bundle), "--steps", str(STEPS), "--page-dir", str(folder), "--digest", "--json")
    events = [json.loads(line) for line in told.splitlines()]
    alone = json.loads(printed("-m", "benchmarks.plain", str(JOB), str(bundle), str(STEPS)).splitlines()[-1])
    losses = [event["loss"] for event in events if event["event"] == "step"]
    digest = next(event["digest"] for event in events if "digest" in event)
    return (alone["losses"], alone["digest"]), (losses, digest)


def finetuned(folder: Path) -> tuple[object, object]:
    """Return the adapters that a model loaded in float32 gets, and those of its 16 bits with
    `--compute float32` within a budget.
    """
    printed("-c", LEFT_ALONE, str(folder))
    model, data, out = (str(folder / name) for name in ("model", "data.jsonl", "out"))
    options = [
        "--seq-len",
        "32",
        "--updates",
        "2",
        "--held-out",
        "0",
        "--compute",
        "float32",
        "--page-dir",
        str(folder),
    ]
    port_agent("finetune", model, "--data", data, "--out", out, "--ram", RAM, *options)
    one, other = (folder.joinpath(name, "adapter_model.safetensors").read_bytes() for name in ("plain", "out"))
    return one, other


KINDS: dict[str, Callable[[Path], tuple[object, object]]] = {
    "exec": followed,
    "mapped": mapped,
    "bundle": planned,
    "finetune": finetuned,
}


def main(kind: str, *bundle: str) -> int:
    """Train both ways; return 1 if they differ."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        plain, ours = bundled(Path(bundle[0]), Path(folder)) if bundle else KINDS[kind](Path(folder))
    if ours != plain:
        sys.stdout.write(
            f"plain:\n{plain!r:.2000}\nours:\n{ours!r:.2000}\n{kind}: other numbers than plain PyTorch's\n"
        )
        return 1
    sys.stdout.write(f"{kind}: the numbers of plain PyTorch\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
