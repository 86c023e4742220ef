"""What lies in a directory that others may write into is reached without following links."""

import gc
import os
from pathlib import Path

import pytest

from port_agent.system.directory_handle import DirectoryHandle, read_sample_file


def test_files_are_made_renamed_linked_and_removed(tmp_path: Path) -> None:
    (tmp_path / "round").mkdir()
    with DirectoryHandle.open(tmp_path) as root, root.below("inbox", make=True) as inbox, root.below("round") as taken:
        assert inbox.path == tmp_path / "inbox"
        with inbox.create(".a.part") as file:
            file.write(b"data")
        inbox.rename(".a.part", "a")
        inbox.link("a", taken)
        inbox.sync()
        assert [(name, status.st_size) for name, status in inbox.files()] == [("a", 4)]
        inbox.remove("a")
        assert [name for name, _ in inbox.files()] == []
    assert (tmp_path / "round/a").read_bytes() == b"data"


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox/file").symlink_to("../victim")
    (tmp_path / "inbox/folder").symlink_to("../jobs")
    with DirectoryHandle.open(tmp_path) as root, root.below("inbox") as inbox:
        for make in (False, True):
            with pytest.raises(OSError, match="a link, which is not followed"):
                inbox.below("folder", make=make)
        with pytest.raises(FileExistsError):
            inbox.create("file")
        with pytest.raises(OSError, match="not a valid regular file"):
            inbox.link("file", root)
        assert list(inbox.files()) == [] and not (tmp_path / "file").exists()
        inbox.remove("file")
    assert (tmp_path / "victim").read_bytes() == b"kept"


def test_a_handle_outlives_its_name(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "jobs").mkdir()
    with DirectoryHandle.open(tmp_path) as root, root.below("inbox") as inbox:
        (tmp_path / "inbox").rename(tmp_path / "moved")
        (tmp_path / "inbox").symlink_to("jobs")
        inbox.create("a").close()
    assert (tmp_path / "moved/a").exists() and not list((tmp_path / "jobs").iterdir())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../a", "a\0b"])
def test_a_name_is_one_entry(tmp_path: Path, name: str) -> None:
    gc.collect()  # descriptors of earlier tests that only wait for it would go meanwhile
    open_before = len(list(Path("/dev/fd").iterdir()))
    with DirectoryHandle.open(tmp_path) as root:
        for act in (root.below, root.create, root.remove, lambda name: root.rename("a", name)):
            with pytest.raises(OSError, match="not a valid plain name"):
                act(name)
    assert len(list(Path("/dev/fd").iterdir())) == open_before


def test_a_sample_file_is_one_link_away_at_most(tmp_path: Path) -> None:
    for folder in ("round", "inbox", "else"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inbox/a").write_bytes(b"sample")
    (tmp_path / "inbox/linked").symlink_to(tmp_path / "else/secret")
    (tmp_path / "else/secret").write_bytes(b"secret")
    (tmp_path / "moved").symlink_to("else")
    os.mkfifo(tmp_path / "inbox/pipe")
    targets: dict[str, str | Path] = {
        "near": "../inbox/a",
        "far": tmp_path / "inbox/a",
        "twice": tmp_path / "inbox/linked",
    }
    for name, target in {**targets, "pipe": tmp_path / "inbox/pipe", "folder": tmp_path / "moved/secret"}.items():
        (tmp_path / "round" / name).symlink_to(target)
    for path in ("inbox/a", "round/near", "round/far"):
        with read_sample_file(tmp_path / path) as stream:
            assert stream.read() == b"sample"
    gc.collect()
    open_before = len(list(Path("/dev/fd").iterdir()))
    for path in ("round/twice", "round/pipe", "round/folder", "round/none", "inbox/pipe"):
        with pytest.raises(OSError):
            read_sample_file(tmp_path / path)
    assert len(list(Path("/dev/fd").iterdir())) == open_before
