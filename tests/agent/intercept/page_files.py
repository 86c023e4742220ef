"""Reach the page file of the budget that is active, as the kernel sees it, and break it."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

LAYER_BYTES = 256 << 10
TWO_LAYERS = 2 * LAYER_BYTES + (64 << 10)
"""A budget that holds two of `layers`, and what passes between them."""


def layers(count: int) -> nn.Sequential:
    """Return layers whose weights take `LAYER_BYTES` each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(count)))


def page_file_fd() -> int:
    """Return the descriptor of the one page file that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if ".port-agent-pages-" in str(entry.readlink()):
                found.append(int(entry.name))
    assert len(found) == 1, found
    return found[0]


@contextlib.contextmanager
def failing_medium() -> Iterator[None]:
    """Let every transfer of the page file fail with EIO, from the kernel: addresses of a child
    that nothing is mapped at.

    Page files below 4 MiB only: programs that cannot be moved begin there.
    """
    number = page_file_fd()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        kept = os.dup(number)
        memory = os.open(f"/proc/{child.pid}/mem", os.O_RDWR)
        os.dup2(memory, number)
        os.close(memory)
        try:
            yield
        finally:
            os.dup2(kept, number)
            os.close(kept)
            child.kill()


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond `nbytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def flip_bits(every_bytes: int = 1 << 20) -> int:
    """Flip one bit in so many bytes of the page file each; return how many."""
    number = os.open(f"/proc/self/fd/{page_file_fd()}", os.O_RDWR)
    try:
        flipped = 0
        for offset in range(0, os.fstat(number).st_size, every_bytes):
            byte = os.pread(number, 1, offset)
            flipped += os.pwrite(number, bytes([byte[0] ^ 4]), offset)
        os.fsync(number)
        return flipped
    finally:
        os.close(number)
