"""The file system under a path."""

import os
from pathlib import Path

import pytest

from port_agent.system.mounts import file_system, in_ram, worn_by_writing


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_the_kind_of_file_system_is_what_the_kernel_says() -> None:
    assert file_system(Path("/dev/shm")) == "tmpfs"
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/nowhere")) == ""
    assert in_ram(Path("/dev/shm")) and not in_ram(Path("/proc/self"))
    assert not worn_by_writing(Path("/dev/shm"))


@pytest.mark.parametrize(("source", "worn"), [("/dev/zram1", False), ("/dev/mmcblk0p2", True)])
def test_compressed_ram_is_not_worn_by_writing(source: str, worn: bool, tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(f"40 27 {numbers} / /pages rw,relatime shared:1 - ext4 {source} rw\n")
    assert worn_by_writing(tmp_path, proc=tmp_path) is worn
