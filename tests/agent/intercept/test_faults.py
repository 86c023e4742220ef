"""Media that fail, lie or are full: said at the operator, and what was resident stays valid."""

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from port_agent import budget
from port_agent.paging.page_space import MIN_FREE_BYTES
from port_agent.paging.pager import CorruptPageError, PageError
from tests.agent.intercept.page_files import (
    LAYER_BYTES,
    TWO_LAYERS,
    failing_medium,
    flip_bits,
    largest_file,
    layers,
    page_file_fd,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.process
def test_a_medium_that_cannot_be_read_is_said_at_the_operator(tmp_path: Path) -> None:
    model, x = layers(4), torch.ones(4, 256)
    with torch.no_grad():
        expected = model(x)
        with budget(tensors=TWO_LAYERS, page_dir=tmp_path).resizing():
            model(x)
            with failing_medium(), pytest.raises(PageError, match="copy your data off it") as raised:
                model(x)
            assert raised.value.errno == errno.EIO
            assert torch.equal(model(x), expected)


@pytest.mark.process
def test_a_medium_that_cannot_be_written_leaves_everything_resident(tmp_path: Path) -> None:
    model, expected = layers(4), layers(4)
    with torch.no_grad(), budget(tensors=TWO_LAYERS, page_dir=tmp_path).resizing():
        left = []
        with failing_medium():
            for p in model.parameters():
                try:
                    p.mul_(2)
                except PageError as error:
                    assert error.errno == errno.EIO and "copy your data off it" in str(error)
                    left.append(p)
        assert len(left) == 2, "two fit, the others did not run at all"
        for p in left:
            p.mul_(2)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q * 2)


def train(model: nn.Module, batches: list[int], path: Path) -> list[float]:
    """Train; after a step whose pages found no room go on with the next batch. Save in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for rows in batches:
        try:
            x = torch.randn(rows, 256, generator=generator)
            loss = model(x).square().mean()
            loss.backward()
        except PageError as error:
            assert error.errno in (errno.ENOSPC, errno.EFBIG) and "--page-dir" in str(error)
            losses.append(float("inf"))
            loss = None
            optimizer.zero_grad()
            torch.save(model.state_dict(), path)
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save([model.state_dict(), optimizer.state_dict()], path.with_suffix(".end"))
    return losses


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """Give a file system of a few MiB where this user may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        if os.system(f"mount -t tmpfs -o size={MIN_FREE_BYTES + (4 << 20)} tmpfs {folder} 2>/dev/null") != 0:
            pytest.skip("mounting takes root")
        try:
            yield Path(folder)
        finally:
            os.system(f"umount {folder}")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("way", ["small disk", "limit of file sizes"])
def test_a_disk_that_fills_up_ends_a_step_and_no_more(way: str, tmp_path: Path) -> None:
    batches = [64, 64, 16_000, 64, 64]
    plain = train(layers(4), [64, 64], tmp_path / "plain")
    with contextlib.ExitStack() as stack:
        if way == "small disk":
            pages = stack.enter_context(small_disk())
            stack.enter_context(budget(tensors="1M", page_dir=pages).resizing())
        else:
            stack.enter_context(budget(tensors="1M", page_dir=tmp_path).resizing())
            stack.enter_context(largest_file(MIN_FREE_BYTES + (4 << 20)))
        model = layers(4)
        losses = train(model, batches, tmp_path / "followed")
    assert losses[:2] == plain and losses[2] == float("inf") and len(losses) == 5
    at_fault = torch.load(tmp_path / "followed")
    for name, value in torch.load(tmp_path / "plain.end")[0].items():
        assert torch.equal(at_fault[name], value)


def test_a_flipped_bit_is_never_read(tmp_path: Path) -> None:
    model, x = layers(4), torch.ones(4, 256)
    lost = pytest.raises(PageError, match=r"2 tensors of 512\.0 KiB are lost and hold NaN")
    with lost, torch.no_grad(), budget(tensors=TWO_LAYERS, page_dir=tmp_path).resizing():
        model(x)
        assert flip_bits(LAYER_BYTES) > 0
        for _ in range(2):
            with pytest.raises(CorruptPageError, match="is not what was written"):
                model(x)
    pairs = list(zip(model.parameters(), layers(4).parameters(), strict=True))
    assert [bool(p.isnan().all()) or torch.equal(p, q) for p, q in pairs] == [True] * 4
    assert sum(bool(p.isnan().all()) for p, _ in pairs) == 2


def test_a_full_disk_is_said_before_the_start(tmp_path: Path) -> None:
    with (
        largest_file(MIN_FREE_BYTES // 2),
        pytest.raises(PageError, match=r"free, and 16.0 MiB of pages did not fit"),
    ):
        budget(tensors="1M", page_dir=tmp_path).resizing().start()
    torch.ones(8).sum()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_pages_in_ram_are_refused_for_a_budget_of_ram() -> None:
    with pytest.raises(PageError, match=r"/dev/shm is itself in RAM \(tmpfs\)"):
        budget(ram="4G", page_dir="/dev/shm").resizing().start()
    with budget(tensors="1M", page_dir="/dev/shm").resizing():
        page_file_fd()


@pytest.mark.process
def test_pages_that_a_child_could_read_are_used_again_when_it_has_ended(tmp_path: Path) -> None:
    model, expected = layers(8), []
    for p in model.parameters():
        p.data = torch.ones_like(p).cumsum(0)
        expected.append(p.detach().clone())
    sizes, done = [], 0
    with torch.no_grad(), budget(tensors=TWO_LAYERS, page_dir=tmp_path).resizing():
        for _ in range(4):
            for p in model.parameters():
                p.add_(1)
            done += 1
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)  # a fork copies no pool of threads
                os.close(writer)
                os.read(reader, 1)
                right = all(torch.equal(p, q + done) for p, q in zip(model.parameters(), expected, strict=True))
                os._exit(0 if right else 1)
            os.close(reader)
            for p in model.parameters():
                p.add_(1)
            done += 1
            os.close(writer)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            sizes.append(os.fstat(page_file_fd()).st_blocks)
    assert sizes[-1] == sizes[1], "no page file that grows with every epoch of a loader"
    for p, q in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p, q + done)
