#!/usr/bin/env python3
"""Run a training script alone and through `exec`, and say whether both printed the same numbers: `make check-arm` does so on an emulated Arm."""

import subprocess
import sys
import tempfile
from pathlib import Path

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


def printed(command: list[str]) -> str:
    """Return what a command prints; its complaints go on to ours. Raises CalledProcessError."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Run both; return 1 where they differ."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        plain = printed([sys.executable, str(script)])
        budget = ["--ram", "1G", "--page-dir", folder]
        followed = printed([sys.executable, "-m", "port_agent.cli", "exec", *budget, "--", str(script)])
    if followed != plain:
        sys.stdout.write(f"plain:\n{plain}\nexec:\n{followed}\nexec printed other numbers\n")
        return 1
    sys.stdout.write(f"exec printed the {len(plain.split())} numbers of plain PyTorch\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
