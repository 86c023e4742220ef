"""The kind of file system of a path."""

from pathlib import Path

_IN_RAM = ("tmpfs", "ramfs")
_COMPRESSED_RAM = "/dev/zram"
"""Prefix of the kernel's compressed block devices in RAM (Documentation/admin-guide/blockdev/zram.rst)."""


def file_system(path: Path, proc: Path = Path("/proc")) -> str:
    """Return the kind of file system under `path` as the kernel names it ("ext4", "tmpfs").

    "" where the kernel does not report it.

    Found by the device number in mountinfo, proc_pid_mountinfo(5); on btrfs and overlays, files have other numbers.
    """
    return _kind_and_source(path, proc)[0]


def in_ram(directory: Path) -> bool:
    """Return whether files in `directory` are kept in RAM."""
    return file_system(directory) in _IN_RAM


def worn_by_writing(path: Path, proc: Path = Path("/proc")) -> bool:
    """Return whether writing to `path` wears a medium out: everything except RAM, compressed or not."""
    kind, source = _kind_and_source(path, proc)
    return kind not in _IN_RAM and not source.startswith(_COMPRESSED_RAM)


def _kind_and_source(path: Path, proc: Path) -> tuple[str, str]:
    try:
        device = path.stat().st_dev
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return "", ""
    wanted = f"{device >> 8 & 0xFFF}:{device & 0xFF | device >> 12 & 0xFFF00}"  # makedev(3), glibc
    for line in reversed(lines):  # the latest mount is on top
        words, _, kind = line.partition(" - ")
        if words.split()[2] == wanted:
            described = kind.split()
            return described[0], described[1]
    return "", ""
