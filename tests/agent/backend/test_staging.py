"""Bytes of a device go to a page file and come back through two buffers, whatever their size."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from port_agent.backend.cpu import DONE
from port_agent.backend.staging import DeviceSide, Staging
from port_agent.paging.pager import BURST, CHUNK, CorruptPageError, PageFile, Pager, Slot
from port_planner.base.direct_io import padded
from tests.simulated_device import SimBackend

pytestmark = pytest.mark.own_process


@pytest.fixture
def backend() -> Iterator[SimBackend]:
    made = SimBackend()
    yield made
    assert made.races() == []


def numbers(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nbytes", [1, 4095, CHUNK, BURST - 1, BURST, 2 * BURST + 12345, 3 * BURST])
def test_there_and_back(nbytes: int, tmp_path: Path, backend: SimBackend) -> None:
    pager = Pager(staging=Staging(backend, BURST))
    file = PageFile(tmp_path / "pages")
    file.reserve(2 * padded(nbytes))
    slots = [Slot(file, k * padded(nbytes), nbytes) for k in range(2)]
    data = [numbers(nbytes, k) for k in range(2)]
    for slot, content in zip(slots, data, strict=True):
        pager.send(slot, content.to("sim"))
    into = [backend.allocate(nbytes) for _ in slots]
    reads = [pager.receive(slot, target) for slot, target in zip(slots, into, strict=True)]
    for transfer in reads:
        transfer.join()
        pager.arrived(transfer)
    for content, target in zip(data, into, strict=True):
        assert torch.equal((target + 0).cpu(), content)
    pager.close()
    file.close()


def test_what_is_read_may_not_be_used_before_it_arrived(tmp_path: Path, backend: SimBackend) -> None:
    pager = Pager(staging=Staging(backend, BURST))
    file = PageFile(tmp_path / "pages")
    slot, data = Slot(file, 0, CHUNK), numbers(CHUNK, 1)
    pager.send(slot, data.to("sim")).join()
    target = backend.allocate(CHUNK)
    pager.receive(slot, target).join()
    early = target + 0
    assert not torch.equal(early.cpu(), data)
    assert any("before they are written" in race for race in backend.races())
    pager.close()
    file.close()


def test_a_torn_page_is_found_on_its_way_to_the_device(tmp_path: Path, backend: SimBackend) -> None:
    pager = Pager(staging=Staging(backend, BURST))
    file = PageFile(tmp_path / "pages", direct=False)
    slot = Slot(file, 0, CHUNK)
    pager.send(slot, numbers(CHUNK, 1).to("sim")).join()
    with open(tmp_path / "pages", "r+b") as stream:
        stream.seek(100)
        stream.write(b"torn")
    with pytest.raises(CorruptPageError, match="not what was written"):
        pager.receive(slot, backend.allocate(CHUNK)).join()
    pager.close()
    file.close()


@pytest.mark.parametrize("nbytes", [1, 4095, CHUNK, BURST - 1, 2 * BURST + 12345])
@pytest.mark.parametrize("begin", [0, 100], ids=["at a block", "within a block"])
def test_what_the_host_reaches_goes_without_copies(
    begin: int, nbytes: int, tmp_path: Path, backend: SimBackend
) -> None:
    backend.unified = True
    staging = Staging(backend, BURST, shares=True)
    pager, file = Pager(staging=staging), PageFile(tmp_path / "pages")
    file.reserve(padded(nbytes))
    slot, data = Slot(file, 0, nbytes), numbers(nbytes, 1)
    there, back = (staging.memory(begin + nbytes)[begin:] for _ in range(2))
    there.copy_(data)
    backend.copied_bytes()
    pager.send(slot, there).join()
    transfer = pager.receive(slot, back)
    transfer.join()
    pager.arrived(transfer)
    assert backend.copied_bytes() == 0
    assert torch.equal((back + 0).cpu(), data)
    pager.send(slot, data.to("sim")).join()  # of memory that it does not reach
    assert backend.copied_bytes() == 2 * nbytes + nbytes, "to the device, from it, and the sum above"
    pager.close()
    file.close()


def test_the_host_waits_for_the_device_before_it_reaches_there(tmp_path: Path, backend: SimBackend) -> None:
    backend.unified = True
    staging = Staging(backend, BURST, shares=True)
    there = staging.memory(CHUNK)
    there.fill_(1)
    early = DeviceSide(staging, there, DONE)
    early.reach()
    assert "the host reaches bytes" in " ".join(backend.races())
    staging.side(there).reach()


def test_its_bytes_are_two_chunks(backend: SimBackend) -> None:
    assert Staging(backend, BURST).nbytes == 2 * BURST
