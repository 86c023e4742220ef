"""A plain loop with autocast and a gradient scaler; arguments: the folder for its checkpoint."""

import itertools
import sys
from pathlib import Path

import torch
from torch import nn


def main(folder: Path) -> None:
    """Train a small convolutional network in bfloat16 and save it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    widths = (3, 64, 128, 256)
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise(widths):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    model = nn.Sequential(
        *layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(256 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(6):
        images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        print(step, loss.item(), norm.item(), scaler.get_scale())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(state, folder / "checkpoint.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
