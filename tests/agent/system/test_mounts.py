"""The file system under a path."""

from pathlib import Path

import pytest

from agent.system.mounts import file_system, in_ram


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_the_kind_of_file_system_is_what_the_kernel_says() -> None:
    assert file_system(Path("/dev/shm")) == "tmpfs"
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/nowhere")) == ""
    assert in_ram(Path("/dev/shm")) and not in_ram(Path("/proc/self"))
