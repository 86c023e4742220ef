"""One scenario of the drop-in in a process of its own; prints what it found as JSON.

Its resident memory must be its own, and a budget just above what torch itself holds forces paging.
"""

import copy
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from agent import budgeted_step
from planner.ir.errors import PortError
from planner.ir.process_memory import resident_bytes

torch.set_num_threads(1)
STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Dropout(0.1), nn.AdaptiveAvgPool2d(16), nn.Flatten(), nn.Linear(4096, 1500), nn.ReLU(), nn.Linear(1500, 10),
    )  # fmt: skip


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    rows = [16] * (STEPS - 1) + [5]
    return [(torch.randn(n, 3, 32, 32, generator=g), torch.randint(0, 10, (n,), generator=g)) for n in rows]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def eager(model: nn.Module) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    torch.manual_seed(5)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, optimizer


def train(page_dir: Path) -> dict[str, Any]:
    """The whole life: schedule, short batch, evaluation, save; then plain PyTorch, and the comparison."""
    model = net()
    start = copy.deepcopy(model)
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    data = batches()
    ram = resident_bytes() + (85 << 20)
    losses, read = [], 0
    with budgeted_step(model, loss_fn, optimizer, data[0], ram=ram, page_dir=page_dir) as step:
        step.reset_peak_bytes()
        torch.manual_seed(5)
        for batch in data:
            losses.append(step(*batch).item())
            scheduler.step()
            assert step.report is not None
            read += step.report.paging.read_bytes
        peak = step.peak_bytes
        planned = step.planned_peak_bytes
        step.save(page_dir.parent / "saved.safetensors")
        evaluated = step.evaluate(*data[0]).item()
    left = [p.name for p in page_dir.iterdir()]
    expected, reference = eager(start)
    start_state, state = start.state_dict(), model.state_dict()
    from safetensors.torch import load_file

    saved = load_file(page_dir.parent / "saved.safetensors")
    start.eval()
    with torch.no_grad():
        plain = loss_fn(start, *data[0]).item()
    own = zip(model.parameters(), start.parameters(), strict=True)
    return {
        "losses": losses == expected, "read_bytes": read, "left": left, "ram": ram, "peak": peak, "planned": planned,
        "weights": all(torch.equal(state[k], v) for k, v in start_state.items()),
        "saved": saved.keys() == start_state.keys() and all(torch.equal(saved[k], v) for k, v in start_state.items()),
        "state": all(torch.equal(optimizer.state[p][k], reference.state[q][k]) for p, q in own for k in reference.state[q]),
        "identity": identities == [id(t) for t in (*model.parameters(), *model.buffers())],
        "evaluated": evaluated == plain,
        "usable": bool(torch.isfinite(loss_fn(model, *data[0])).item()),
    }  # fmt: skip


def fail(page_dir: Path) -> dict[str, Any]:
    """An exception in the block: what was trained so far is in the model, the directory is empty."""
    model = net()
    start = copy.deepcopy(model)
    data = batches()
    caught = False
    try:
        with budgeted_step(
            model, loss_fn, optimizer_of(model), data[0], resident_bytes() + (85 << 20), page_dir
        ) as step:
            torch.manual_seed(5)
            step(*data[0])
            raise KeyError("the user's own")
    except KeyError:
        caught = True
    optimizer = optimizer_of(start)
    torch.manual_seed(5)
    loss_fn(start, *data[0]).backward()
    optimizer.step()
    same = all(torch.equal(model.state_dict()[k], v) for k, v in start.state_dict().items())
    return {"caught": caught, "left": [p.name for p in page_dir.iterdir()], "same": same}


def infeasible(page_dir: Path) -> dict[str, Any]:
    """Budgets that cannot be kept: below what the process holds, and just above it."""
    model = net()
    before = copy.deepcopy(model.state_dict())
    found = []
    for ram in (10 << 20, resident_bytes() + (2 << 20)):
        try:
            with budgeted_step(model, loss_fn, optimizer_of(model), batches()[0], ram=ram, page_dir=page_dir):
                found.append(["none", None, ""])
        except PortError as error:
            found.append([type(error).__name__, getattr(error, "needed_bytes", None), str(error)])
    same = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    return {"errors": found, "left": [p.name for p in page_dir.iterdir()], "same": same}


def no_restore(page_dir: Path) -> dict[str, Any]:
    """`restore=False` leaves on flash what was paged; what `save` wrote is the result."""
    model = net()
    start = copy.deepcopy(model)
    data = batches()
    made = optimizer_of(model)  # before memory is read: making the first optimizer imports 70 MiB
    ram = resident_bytes() + (85 << 20)
    saved = page_dir.parent / "saved.safetensors"
    with budgeted_step(model, loss_fn, made, data[0], ram, page_dir, restore=False) as step:
        torch.manual_seed(5)
        for batch in data[:2]:
            step(*batch)
        step.save(saved)
    optimizer = optimizer_of(start)
    torch.manual_seed(5)
    for batch in data[:2]:
        optimizer.zero_grad()
        loss_fn(start, *batch).backward()
        optimizer.step()
    from safetensors.torch import load_file

    result = load_file(saved)
    same = all(torch.equal(result[k], v) for k, v in start.state_dict().items())
    return {"saved": same, "left": [p.name for p in page_dir.iterdir()]}


def full(page_dir: Path) -> dict[str, Any]:
    """The medium fills up while it is measured, while weights move there: nothing is lost."""
    model = net()
    made = optimizer_of(model)
    before = copy.deepcopy(model.state_dict())
    data = batches()
    ram = resident_bytes() + (85 << 20)
    real = os.pwrite
    found = []
    for room in (0, 70 << 20):
        left = room

        def pwrite(fd: int, data: Any, offset: int) -> int:
            nonlocal left
            left -= len(data)
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

        os.pwrite = pwrite
        try:
            with budgeted_step(model, loss_fn, made, data[0], ram, page_dir) as step:
                step(*data[0])
        except PortError as error:
            found.append([type(error).__name__, "free" in str(error)])
        finally:
            os.pwrite = real
    same = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    return {"errors": found, "left": [p.name for p in page_dir.iterdir()], "same": same}


if __name__ == "__main__":
    scenario, folder = sys.argv[1:]
    print(json.dumps(globals()[scenario](Path(folder))))
