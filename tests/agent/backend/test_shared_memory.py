"""Memory that a device and the host both reach is the same bytes, counted, and held until
the device is done with it.
"""

import gc

import torch

from port_agent.backend.raw_bytes import block
from port_agent.backend.shared_memory import SharedMemory

CPU = torch.device("cpu")
"""A storage over memory of someone else's is made on it as on any device."""
SIZE = 1 << 16


class Event:
    """The end of what a device was given; notes when it is waited for."""

    def __init__(self) -> None:
        self.waits = 0
        self.held_then = -1
        self.memory: SharedMemory | None = None

    def synchronize(self) -> None:
        self.waits += 1
        if self.memory is not None:
            self.held_then = self.memory.live_bytes

    def query(self) -> bool:
        return True


def test_both_sides_are_the_same_bytes() -> None:
    memory = SharedMemory(CPU, block, Event)
    made = memory.allocate(SIZE)
    host = memory.host_view(made)
    assert host is not None and host.data_ptr() == made.data_ptr() and host.numel() == made.numel() >= SIZE
    made.fill_(7)
    assert bool((host == 7).all())
    part = memory.host_view(made[100:200])
    assert part is not None and part.data_ptr() == made.data_ptr() + 100 and part.numel() == 100
    assert memory.host_view(torch.empty(10, dtype=torch.uint8)) is None


def test_it_is_counted_and_held_until_the_device_is_done() -> None:
    end, told = Event(), list[int]()
    memory = SharedMemory(CPU, block, lambda: end, lambda: told.append(memory.live_bytes))
    end.memory = memory
    first, second = memory.allocate(SIZE), memory.allocate(SIZE)
    assert (memory.live_bytes, memory.peak_bytes, told) == (2 * SIZE, 2 * SIZE, [SIZE, 2 * SIZE])
    view = first[:10]
    del first
    gc.collect()
    assert end.waits == 0, "a view of it is still there"
    del view
    gc.collect()
    assert (end.waits, end.held_then, memory.live_bytes, told[-1]) == (1, 2 * SIZE, SIZE, SIZE)
    assert memory.peak_bytes == 2 * SIZE
    memory.reset_peak()
    assert memory.peak_bytes == SIZE == second.numel()
