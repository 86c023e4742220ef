"""The page thread on real files: alignment, fallbacks, a medium that is full, read-only, failing or lying."""

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from port_agent.backend.raw_bytes import block
from port_agent.paging.pager import (
    CHUNK,
    ZEROS,
    CorruptPageError,
    PageError,
    PageFile,
    Pager,
    Slot,
    unnamed_page_file,
)
from port_planner.base.direct_io import BLOCK, padded

ROOT = Path(__file__).resolve().parents[3]
SIZES = (1, 511, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 12345)


@pytest.fixture
def pager() -> Iterator[Pager]:
    pager = Pager()
    yield pager
    pager.close()


def made_up(nbytes: int, *, aligned: bool = True) -> torch.Tensor:
    """Return random bytes, none of them zero, whose memory reaches to the end of the last block;
    misaligned by 16 if wanted.
    """
    base = block(padded(nbytes) + BLOCK)
    start = (-base.data_ptr()) % BLOCK + (0 if aligned else 16)
    view = base[start : start + nbytes]
    view.copy_(torch.randint(1, 256, (nbytes,), dtype=torch.uint8))
    return view


def round_trip(pager: Pager, file: PageFile, data: torch.Tensor, *, aligned: bool = True) -> torch.Tensor:
    slot = Slot(file, 0, data.numel())
    file.reserve(padded(data.numel()))
    pager.wait(pager.write(slot, data.data_ptr(), data))
    back = made_up(data.numel(), aligned=aligned)
    pager.wait(pager.read(slot, back.data_ptr(), back))
    return back


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_comes_back(pager: Pager, tmp_path: Path, nbytes: int, aligned: bool, direct: bool) -> None:
    file = PageFile(tmp_path / "pages", direct=direct)
    data = made_up(nbytes, aligned=aligned)
    assert torch.equal(round_trip(pager, file, data, aligned=aligned), data)
    assert pager.stats.written_bytes == pager.stats.read_bytes == nbytes
    assert pager.stats.unworn_bytes == (0 if file.worn else nbytes)
    assert min(pager.stats.read_seconds, pager.stats.write_seconds) > 0
    file.close()


def weights(count: int) -> torch.Tensor:
    """Return the bytes of numbers as weights are."""
    return (0.02 * torch.randn(count, generator=torch.Generator().manual_seed(0))).view(torch.uint8)


@pytest.mark.parametrize("direct", [True, False])
def test_chunks_of_numbers_lie_packed_and_what_would_not_get_smaller_as_it_is(
    pager: Pager, tmp_path: Path, direct: bool
) -> None:
    file = PageFile(tmp_path / "pages", direct=direct)
    data = torch.cat([weights(CHUNK // 4), made_up(CHUNK), weights(20_000)])
    slot = Slot(file, 0, data.numel(), item_bytes=4)
    file.reserve(padded(data.numel()))
    pager.wait(pager.send(slot, data))
    assert [length > 0 for length in slot.packed_bytes] == [True, False, True]
    assert pager.stats.written_bytes < data.numel() - CHUNK // 10
    for start, stop in ((0, data.numel()), (CHUNK, 2 * CHUNK), (2 * CHUNK, data.numel())):
        back = made_up(stop - start, aligned=False)
        pager.wait(pager.receive(slot, back, start, stop - start))
        assert torch.equal(back, data[start:stop])
    again = made_up(data.numel())
    pager.wait(pager.send(slot, again))
    back = made_up(data.numel())
    pager.wait(pager.receive(slot, back))
    assert slot.packed_bytes == [0, 0, 0] and torch.equal(back, again)
    file.close()


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("item_bytes", [0, 4])
@pytest.mark.parametrize("aligned", [True, False])
def test_chunks_of_zeros_are_neither_written_nor_read(
    pager: Pager, tmp_path: Path, direct: bool, item_bytes: int, aligned: bool
) -> None:
    file, full = PageFile(tmp_path / "pages", direct=direct), made_up(CHUNK)
    nearly = torch.zeros(CHUNK, dtype=torch.uint8)
    nearly[-1] = 1
    data = torch.cat([torch.zeros_like(full), full, torch.zeros(2 * CHUNK), nearly, torch.zeros(77)]).to(torch.uint8)
    slot = Slot(file, 0, data.numel(), item_bytes=item_bytes)
    file.reserve(padded(data.numel()))
    pager.wait(pager.send(slot, made_up(data.numel())))  # what lay there before
    before = pager.stats.written_bytes
    pager.wait(pager.send(slot, data))
    assert [length == ZEROS for length in slot.packed_bytes] == [True, False, True, True, False, True]
    written = pager.stats.written_bytes - before
    assert written == 2 * CHUNK if not item_bytes else CHUNK < written < 2 * CHUNK
    back = made_up(data.numel(), aligned=aligned)
    pager.wait(pager.receive(slot, back))
    assert torch.equal(back, data) and pager.stats.read_bytes == written
    pager.wait(pager.send(slot, full, CHUNK * 2))  # a chunk of zeros that is no longer one
    pager.wait(pager.receive(slot, back))
    data[2 * CHUNK : 3 * CHUNK] = full
    assert torch.equal(back, data)
    file.close()


@pytest.mark.parametrize("rotten", [False, True])
def test_a_packed_chunk_that_was_damaged_is_named(pager: Pager, tmp_path: Path, rotten: bool) -> None:
    """The checksum is one of the bytes on the medium; a chunk that was packed wrongly is found when it is unpacked."""
    file, data = PageFile(tmp_path / "pages"), weights(CHUNK // 4)
    slot = Slot(file, 0, data.numel(), item_bytes=4)
    file.reserve(padded(data.numel()))
    pager.wait(pager.send(slot, data))
    if rotten:
        with open(tmp_path / "pages", "r+b") as stream:
            stream.seek(77)
            byte = stream.read(1)[0]
            stream.seek(77)
            stream.write(bytes([byte ^ 4]))
    else:
        slot.packed_bytes[0] -= BLOCK
        slot.sums[0] = None
    with pytest.raises(
        CorruptPageError, match="not what was written" if rotten else "not a valid packed page of 1048576"
    ) as caught:
        pager.wait(pager.receive(slot, made_up(data.numel())))
    assert (caught.value.path, caught.value.offset) == (tmp_path / "pages", 0)
    file.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_read_touches_nothing_beyond_its_bytes(pager: Pager, tmp_path: Path, nbytes: int) -> None:
    """What follows in the last block may be another allocation."""
    file = PageFile(tmp_path / "pages")
    slot = Slot(file, 0, nbytes)
    file.reserve(padded(nbytes))
    data = made_up(nbytes)
    pager.wait(pager.write(slot, data.data_ptr(), data))
    base = block(padded(nbytes) + BLOCK)
    base.fill_(7)
    pager.wait(pager.read(slot, base.data_ptr(), base))
    assert torch.equal(base[:nbytes], data)
    assert bool((base[nbytes:] == 7).all())
    file.close()


def test_a_file_system_without_o_direct_falls_back(
    pager: Pager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel's answer of a file system without O_DIRECT; newer tmpfs accepts it."""
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refusing)
    file = PageFile(tmp_path / "pages")
    monkeypatch.undo()
    assert not file.direct
    data = made_up(CHUNK + 777)
    assert torch.equal(round_trip(pager, file, data), data)
    file.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_tmpfs(pager: Pager) -> None:
    path = Path("/dev/shm") / f"port-test-{os.getpid()}"
    file = PageFile(path)
    try:
        data = made_up(CHUNK + 777)
        assert torch.equal(round_trip(pager, file, data), data)
    finally:
        file.close()
        path.unlink()


def test_a_part_of_a_slot(pager: Pager, tmp_path: Path) -> None:
    file = PageFile(tmp_path / "pages")
    data = made_up(3 * CHUNK)
    slot = Slot(file, 0, 3 * CHUNK)
    file.reserve(3 * CHUNK)
    for start in (2 * CHUNK, 0, CHUNK):
        pager.wait(pager.write(slot, data.data_ptr() + start, data, start, CHUNK))
    back = made_up(CHUNK)
    pager.wait(pager.read(slot, back.data_ptr(), back, CHUNK, CHUNK))
    assert torch.equal(back, data[CHUNK : 2 * CHUNK])
    file.close()


def test_order_is_kept(pager: Pager, tmp_path: Path) -> None:
    """A read that is queued behind a write of the same slot gives what was written."""
    file = PageFile(tmp_path / "pages")
    slot = Slot(file, 0, CHUNK)
    file.reserve(CHUNK)
    first, second, back = made_up(CHUNK), made_up(CHUNK), made_up(CHUNK)
    pager.write(slot, first.data_ptr(), first)
    pager.write(slot, second.data_ptr(), second)
    pager.wait(pager.read(slot, back.data_ptr(), back))
    assert torch.equal(back, second)
    file.close()


def test_the_throttle_sleeps_as_long_as_the_slower_medium_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only sleeping moves, so that nothing depends on this machine."""
    import port_agent.paging.pager as module

    now = [0.0]

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    monkeypatch.setattr(module, "time", Clock)
    pager = Pager(read_bytes_per_s=45e6, write_bytes_per_s=25e6)
    file = PageFile(tmp_path / "pages")
    data = made_up(8 * CHUNK)
    slot = Slot(file, 0, data.numel())
    file.reserve(data.numel())
    pager.wait(pager.write(slot, data.data_ptr(), data))
    written = now[0]
    pager.wait(pager.read(slot, data.data_ptr(), data))
    assert written == pytest.approx(data.numel() / 25e6)
    assert now[0] - written == pytest.approx(data.numel() / 45e6)
    pager.close()
    file.close()


# -- a medium that fails


@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_is_noticed(pager: Pager, tmp_path: Path, direct: bool) -> None:
    file = PageFile(tmp_path / "pages", direct=direct)
    data = made_up(2 * CHUNK + 100)
    slot = Slot(file, 0, data.numel())
    file.reserve(padded(data.numel()))
    pager.wait(pager.write(slot, data.data_ptr(), data))
    place = CHUNK + 4321
    with open(file.path, "r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 0x10]))
        os.fsync(stream.fileno())
    back = made_up(data.numel())
    with pytest.raises(CorruptPageError, match=str(CHUNK)) as caught:
        pager.wait(pager.read(slot, back.data_ptr(), back))
    assert caught.value.path == file.path
    file.close()


def test_a_file_that_was_cut_off(pager: Pager, tmp_path: Path) -> None:
    file = PageFile(tmp_path / "pages")
    data = made_up(2 * CHUNK)
    slot = Slot(file, 0, data.numel())
    pager.wait(pager.write(slot, data.data_ptr(), data))
    os.truncate(file.path, CHUNK)
    with pytest.raises(CorruptPageError, match="truncated or replaced"):
        pager.wait(pager.read(slot, data.data_ptr(), data))
    file.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_no_space_left(pager: Pager, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        file = PageFile(tmp_path / "pages")
        with pytest.raises(PageError, match="free space") as caught:
            file.reserve(8 << 20)
        assert caught.value.errno == errno.ENOSPC
        data = made_up(8 * CHUNK)
        with pytest.raises(PageError, match="free space"):
            pager.wait(pager.write(Slot(file, 0, data.numel()), data.data_ptr(), data))
        file.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting read-only needs root")
def test_a_read_only_file_system(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(PageError, match="read-only") as caught:
            PageFile(tmp_path / "pages")
        assert caught.value.errno == errno.EROFS
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.process
def test_a_directory_without_write_access(tmp_path: Path) -> None:
    """Asked of a process without root's privileges."""
    tmp_path.chmod(0o555)
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from port_agent.paging.pager import PageError, PageFile
if os.geteuid() == 0:
    os.setuid(65534)
try:
    PageFile(Path({str(tmp_path)!r}) / "pages")
except PageError as error:
    print(error.errno, error)
"""
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and parent.name.startswith("pytest"):
            parent.chmod(0o755)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(str(errno.EACCES)) and "write access" in result.stdout


def _closed(file: PageFile) -> None:
    file.close()


def _write_only(file: PageFile) -> None:
    os.close(file.fd)
    file.fd = os.open(file.path, os.O_RDONLY)


def _full(file: PageFile) -> None:
    os.close(file.fd)
    file.fd, file.direct = os.open("/dev/full", os.O_RDWR), False


@pytest.mark.parametrize(
    ("damage", "number"), [(_closed, errno.EBADF), (_write_only, errno.EBADF), (_full, errno.ENOSPC)]
)
def test_errors_of_the_system_reach_who_waits(
    pager: Pager, tmp_path: Path, damage: Callable[[PageFile], None], number: int
) -> None:
    file = PageFile(tmp_path / "pages")
    damage(file)
    data = made_up(CHUNK)
    with pytest.raises(PageError) as caught:
        pager.wait(pager.write(Slot(file, 0, CHUNK), data.data_ptr(), data))
    assert caught.value.errno == number
    good = PageFile(tmp_path / "good")
    assert torch.equal(round_trip(pager, good, data), data), "the page thread goes on after an error"
    good.close()


def test_an_io_error_of_the_medium_is_named(pager: Pager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = PageFile(tmp_path / "pages")
    data = made_up(CHUNK)
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(PageError, match="medium reports an error") as caught:
        pager.wait(pager.write(Slot(file, 0, CHUNK), data.data_ptr(), data))
    assert caught.value.errno == errno.EIO
    file.close()


@pytest.mark.process
def test_a_file_size_limit(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a process of its own: EFBIG from the kernel, a PageError here, no signal."""
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from port_agent.paging.pager import PageError, PageFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
file = PageFile(Path({str(tmp_path)!r}) / "pages")
try:
    file.reserve(4 << 20)
except PageError as error:
    print("PageError", error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("PageError")


def test_closing_finishes_what_is_queued(tmp_path: Path) -> None:
    pager = Pager()
    file = PageFile(tmp_path / "pages")
    data = made_up(4 * CHUNK)
    transfers = [pager.write(Slot(file, i * data.numel(), data.numel()), data.data_ptr(), data) for i in range(4)]
    pager.close()
    assert all(t.done() for t in transfers)
    assert not any(t.name == "page-thread" and t.is_alive() and t is pager._thread for t in threading.enumerate())
    file.close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20


def test_a_page_file_is_no_link_and_a_temporary_one_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / "state.pages").symlink_to("victim")
    with pytest.raises(PageError, match="could not be opened"):
        PageFile(tmp_path / "state.pages")
    file = unnamed_page_file(tmp_path)
    file.reserve(1 << 20)
    file.close()
    assert (tmp_path / "victim").read_bytes() == b"kept" and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(PageError, match=r"no page file can be created in .*nowhere: No such file"):
        unnamed_page_file(tmp_path / "nowhere")


def test_a_medium_that_becomes_read_only_while_a_page_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    close, closed = PageFile.close, []

    def note(file: PageFile) -> None:
        closed.append(file)
        close(file)

    monkeypatch.setattr(PageFile, "close", note)
    with pytest.raises(PageError, match=r"no page file can be created in .*: Read-only file system") as caught:
        unnamed_page_file(tmp_path)
    assert caught.value.errno == errno.EROFS and len(closed) == 1


def test_whatever_goes_wrong_reaches_who_waits_and_the_thread_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager, slot = Pager(), Slot(PageFile(tmp_path / "pages"), 0, 4096)
    source = torch.arange(4096, dtype=torch.uint8)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(Pager, "_write_chunk", fail)
        with pytest.raises(MemoryError, match="none left"):
            pager.wait(pager.write(slot, source.data_ptr(), source))
    pager.wait(pager.write(slot, source.data_ptr(), source))
    pager.close()
