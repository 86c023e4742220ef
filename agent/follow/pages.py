"""The page file of a followed program: regions for storages that are away.

The file has no name from the moment it is opened, so nothing is left behind however the process ends. Space is allocated
before it is used, so that a full disk shows at the operator that asks for room and not while pages are written.
"""

import os
import tempfile
from collections import defaultdict
from pathlib import Path

from agent.train.pager import PageError, PageFile, Slot, padded

GROWTH_BYTES = 64 << 20
"""The file grows by this much at a time: one fallocate instead of one per region."""


class PageSpace:
    """Regions of one unlinked page file, used again by size."""

    def __init__(self, directory: Path) -> None:
        try:
            handle, name = tempfile.mkstemp(prefix=".port-agent-pages-", dir=directory)
        except OSError as error:
            raise PageError(
                f"no page file can be made in {directory}: {os.strerror(error.errno or 0)}; choose another page_dir",
                error.errno,
            ) from error
        os.close(handle)
        path = Path(name)
        try:
            self.file = PageFile(path)
        finally:
            path.unlink()
        self._end = 0
        self._reserved = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._era = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that hold or held pages."""
        return self._end

    def take(self, nbytes: int) -> Slot:
        """Return a region for `nbytes`. Raises PageError where the disk is full."""
        size = padded(nbytes)
        holes = self._free[size]
        if holes:
            return Region(self.file, holes.pop(), nbytes, self._era)
        if self._end + size > self._reserved:
            wanted = self._end + max(size, GROWTH_BYTES)
            try:
                self.file.reserve(wanted)
            except PageError:
                wanted = self._end + size
                self.file.reserve(wanted)
            self._reserved = wanted
        region = Region(self.file, self._end, nbytes, self._era)
        self._end += size
        return region

    def give_back(self, region: Slot) -> None:
        """Let a region be used again, unless a child process may still read it."""
        if isinstance(region, Region) and region.era == self._era:
            self._free[padded(region.nbytes)].append(region.offset)

    def writable(self, region: Slot) -> bool:
        """Tell whether a region may be overwritten: it was taken after the last fork."""
        return isinstance(region, Region) and region.era == self._era

    def forked(self) -> None:
        """Never overwrite what a child process inherited as its pages."""
        self._era += 1
        self._free.clear()

    def close(self) -> None:
        self.file.close()


class Region(Slot):
    """A region of the page file, and the era between two forks in which it was taken."""

    __slots__ = ("era",)

    def __init__(self, file: PageFile, offset: int, nbytes: int, era: int) -> None:
        super().__init__(file, offset, nbytes)
        self.era = era
