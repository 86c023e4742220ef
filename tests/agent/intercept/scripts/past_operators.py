"""A program that reaches its tensors past the operators, made before its budget and in it.

`python past_operators.py SEED BUDGET...` prints checksums of all it saw, in a round for each budget of tensors; "none"
is a round without one.
"""

import contextlib
import ctypes
import io
import os
import random
import sys
import tempfile
import threading
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from port_agent import budget

STEPS = 4
MOST_ELEMENTS = 400_000
seed = int(sys.argv[1])
draw = random.Random(seed)
torch.manual_seed(seed)
folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's numbers, read past the operators."""
    return zlib.crc32(tensor.detach().contiguous().numpy())  # type: ignore[arg-type]  # a buffer


def some() -> Tensor:
    """Return random numbers, of a few bytes up to 1.5 MiB."""
    return torch.randn(draw.randrange(1, MOST_ELEMENTS))


def by_address(address: int, count: int) -> float:
    """Return the sum of numbers at an address that was asked for before the budget began, doubled in place."""
    numbers = np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)
    numbers *= 2
    return float(numbers.sum())


def through_files(tensor: Tensor) -> list[int]:
    """Return checksums of what files give back: the kernel reads and writes the tensors' memory."""
    path = folder / "file"
    tensor.numpy().tofile(path)
    read, parts, saved = torch.empty_like(tensor), torch.empty_like(tensor), io.BytesIO()
    with path.open("rb", buffering=0) as file:
        file.readinto(read.numpy())  # type: ignore[arg-type]  # a buffer
        file.seek(0)
        os.readv(file.fileno(), [memoryview(parts.numpy()).cast("B")])
    torch.save(tensor, saved)
    torch.save(tensor, path)
    return [
        checksum(one) for one in (read, parts, torch.load(io.BytesIO(saved.getvalue())), torch.load(path, mmap=True))
    ]


def in_child(tensors: list[Tensor]) -> int:
    """Return a checksum that a forked child computed, which writes the tensors, too."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        for tensor in tensors:
            tensor.add_(1)
        os.write(sending, sum(map(checksum, tensors)).to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(child, 0)
    return int.from_bytes(os.read(receiving, 8), "little")


model = torch.nn.Sequential(
    *(layer for _ in range(draw.randint(2, 4)) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU()))
)
optimizer = (torch.optim.AdamW, torch.optim.Adagrad)[seed % 2](model.parameters(), lr=1e-3)
made = [some() for _ in range(16)]
arrays = [one.numpy() for one in made[:4]]
addresses = [(one.data_ptr(), one.numel()) for one in made[4:8]]
borrowed = torch.from_numpy(np.arange(MOST_ELEMENTS, dtype=np.float32))
grown = torch.ones(MOST_ELEMENTS)
seen: list[object] = []


def train() -> None:
    """Train, and reach the tensors in every other way in between."""
    for step in range(STEPS):
        loss = model(torch.randn(64, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made[draw.randrange(8, 16)] = some()  # frees one that was made before
        for array in arrays:
            array += 1
        made[5].apply_(lambda value: value + 1) if made[5].numel() < 1 << 12 else made[5].add_(1)
        thread = threading.Thread(target=lambda: [one.mul_(1.5) for one in made[8:]])
        thread.start()
        thread.join()
        borrowed.mul_(1.01)
        grown.resize_(draw.randrange(1, MOST_ELEMENTS)).fill_(step)
        shared = made[step].clone().share_memory_().add_(1)
        seen.append([loss.item(), grown.sum().item(), checksum(borrowed), checksum(shared)])
        seen.append([by_address(*one) for one in addresses])
        seen.append([checksum(one) for one in made] + through_files(made[8 + step]))
        if step == 2:
            seen.append(in_child(made))


for number, bound in enumerate(sys.argv[2:]):
    pages = folder / str(number)  # another medium for each
    pages.mkdir()
    with contextlib.nullcontext() if bound == "none" else budget(tensors=bound, page_dir=pages) as running:
        train()
    if running is not None:
        sys.stderr.write(f"{running.report.read_bytes}\n")
    seen.append([checksum(one) for one in (*made, *model.parameters())])
    seen.append(sum(checksum(some()) for _ in range(8)))
sys.stdout.write(f"{seen}\n")
