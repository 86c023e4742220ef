"""Files that arrive: every part once whatever comes twice, late, too long or damaged, across restarts;
a disk that takes no more.
"""

import hashlib
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.peers import transfer as transfer_module
from port_agent.peers.transfer import (
    CHUNK_BYTES,
    FileTransfer,
    IncomingFile,
    file_bytes,
    file_hash,
    read_chunk,
    sha256_of,
)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def incoming(folder: Path, contents: list[bytes]) -> FileTransfer:
    """Return what a device has that was just started."""
    files = [IncomingFile(folder / str(n), len(content), digest(content)) for n, content in enumerate(contents)]
    return FileTransfer(files)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_order_parts_come_in_the_files_are_whole_in_the_end(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    contents = [draw.randbytes(draw.choice([0, 1, 7, 300])) for _ in range(draw.randint(1, 5))]
    transfer, parts = incoming(tmp_path, contents), 0
    before = transfer.position
    while (at := transfer.position)[0] < len(contents):
        assert at >= before, "it never goes back"
        before, number, offset = at, *at
        match draw.randrange(6):
            case 0:  # a part that leaves a gap, or is from before
                stray = draw.randrange(400)
                wrong = transfer.files[number].received
                transfer.files[number].take(stray if stray != offset else offset + 1, b"stray")
                assert transfer.files[number].received == wrong
            case 1:  # the device is started again
                transfer = incoming(tmp_path, contents)
            case 2:  # more than was announced
                transfer.files[number].take(offset, contents[number][offset:] + b"more")
            case _:
                part = contents[number][offset : offset + draw.randint(1, 100)]
                transfer.files[number].take(offset, part)
                transfer.files[number].take(offset, part)  # it comes twice
                parts += 1
    assert transfer.position == (len(contents), 0) and transfer.verify() is None
    assert [(tmp_path / str(n)).read_bytes() for n, content in enumerate(contents) if content] == list(
        filter(None, contents)
    )


def test_a_damaged_file_comes_anew_and_no_other(tmp_path: Path) -> None:
    contents = [b"first", b"second", b"third"]
    transfer = incoming(tmp_path, contents)
    for file, content in zip(transfer.files, contents, strict=True):
        file.take(0, content)
    transfer.files[1].path.write_bytes(b"sEcond")
    assert transfer.verify() == transfer.files[1] and transfer.position == (1, 0)
    transfer.files[1].take(0, b"second")
    assert transfer.verify() is None


def test_without_a_hash_it_is_whole_when_it_is_long_enough(tmp_path: Path) -> None:
    file = IncomingFile(tmp_path / "file", 4)
    file.take(0, b"12345678")
    assert file.is_whole and file.verify() and file.path.read_bytes() == b"1234"


def test_places_are_made_and_what_is_too_long_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"longer than it may be")
    transfer = FileTransfer([IncomingFile(tmp_path / name, nbytes) for name, nbytes in (("old", 3), ("a/b/c", 0))])
    transfer.prepare()
    assert transfer.position == (0, 0) and (tmp_path / "a/b/c").read_bytes() == b""


def test_hashes_are_found_once_as_long_as_a_file_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "file", list[Path]()
    monkeypatch.setattr(transfer_module, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    file.write_bytes(b"one")
    assert [file_hash(file), file_hash(file)] == [digest(b"one")] * 2 and read == [file]
    file.write_bytes(b"another")
    assert file_hash(file) == digest(b"another") and read == [file] * 2
    file.unlink()
    with pytest.raises(OSError):
        file_hash(file)


def test_a_part_is_read_from_where_it_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(CHUNK_BYTES) + b"rest")
    assert len(read_chunk(tmp_path / "file", 0)) == CHUNK_BYTES
    assert read_chunk(tmp_path / "file", CHUNK_BYTES) == b"rest"
    assert file_bytes(tmp_path / "file") == CHUNK_BYTES + 4 and file_bytes(tmp_path / "none") == 0


@pytest.fixture
def room() -> Iterator[None]:
    """Have no file grow beyond 4 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_is_an_error_and_leaves_the_file_as_it_was(tmp_path: Path, room: None) -> None:
    file = IncomingFile(tmp_path / "file", 1 << 20)
    file.take(0, b"one ")
    with pytest.raises(OSError):
        file.take(4, b"x" * 10_000)
    file.take(4, b"two")
    assert (tmp_path / "file").read_bytes() == b"one two"
