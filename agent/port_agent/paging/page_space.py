"""The page file of a program under `exec`: regions for evicted storages.

The file is unlinked as soon as it is opened, so nothing is left behind however the process ends. Space is allocated
before it is used, so that a full disk is noticed at the operator that needs space, and not while pages are written.
"""

import contextlib
import os
import select
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from port_agent.paging.pager import PageError, PageFile, Slot, unnamed_page_file
from port_agent.system.mounts import file_system, in_ram
from port_planner.base.direct_io import padded
from port_planner.base.units import format_bytes

GROWTH_BYTES = 64 << 20
"""Bytes by which the file grows: one fallocate instead of one per region."""

MIN_FREE_BYTES = 16 << 20
"""Least free space in bytes; a medium with less is rejected at the start."""

_PERSISTENT_TEMPORARY = Path("/var/tmp")
"""Directory on a disk even if /tmp is in RAM (Filesystem Hierarchy Standard 3.0, 5.15)."""


def default_page_dir() -> Path:
    """Return the default directory for pages."""
    return _PERSISTENT_TEMPORARY if os.access(_PERSISTENT_TEMPORARY, os.W_OK) else Path(tempfile.gettempdir())


def check_not_in_ram(directory: Path) -> None:
    """Raise PageError if files in `directory` are kept in RAM."""
    if in_ram(directory):
        raise PageError(
            f"{directory} is itself in RAM ({file_system(directory)}), so pages in it would save nothing; choose "
            "another --page-dir (page_dir=), on a disk"
        )


class PageSpace:
    """Regions of one unlinked page file, reused by size.

    Raises PageError if `directory` cannot hold pages.
    """

    def __init__(self, directory: Path) -> None:
        self.file = unnamed_page_file(directory)
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._readers = ForkedReaders()
        self._held: list[Region] = []
        """Regions that were given back while a child process may still read them."""
        self._check_free(directory)
        self._reserved = MIN_FREE_BYTES

    def _check_free(self, directory: Path) -> None:
        try:
            self.file.reserve(MIN_FREE_BYTES)
        except PageError as error:
            self.file.close()
            free = format_bytes(shutil.disk_usage(directory).free)
            raise PageError(
                f"{directory} has {free} free, and {format_bytes(MIN_FREE_BYTES)} of pages did not fit "
                f"({os.strerror(error.errno or 0)}); free space there or choose another --page-dir (page_dir=)",
                error.errno,
            ) from error

    def take(self, nbytes: int) -> Slot:
        """Return a region for `nbytes`. Raises PageError if the disk is full."""
        size = padded(nbytes)
        self._reclaim()
        holes = self._free[size]
        if holes:
            return Region(self.file, holes.pop(), nbytes, self._readers.era)
        if self._end + size > self._reserved:
            wanted = self._end + max(size, GROWTH_BYTES)
            try:
                self.file.reserve(wanted)
            except PageError:
                wanted = self._end + size
                self.file.reserve(wanted)
            self._reserved = wanted
        region = Region(self.file, self._end, nbytes, self._readers.era)
        self._end += size
        return region

    def give_back(self, region: Slot) -> None:
        """Let a region be reused as soon as no child process can read it."""
        if isinstance(region, Region):
            self._held.append(region)
            self._reclaim()

    def writable(self, region: Slot) -> bool:
        """Return whether a region may be overwritten: no living child process may read it."""
        return isinstance(region, Region) and not self._readers.may_read(region.era)

    def _reclaim(self) -> None:
        if not self._held:
            return
        still_read = []
        for region in self._held:
            if self._readers.may_read(region.era):
                still_read.append(region)
            else:
                self._free[padded(region.nbytes)].append(region.offset)
        self._held = still_read

    def about_to_fork(self) -> None:
        """Prepare to notice the child's end."""
        self._readers.about_to_fork()

    def forked(self) -> None:
        """In the parent: do not overwrite pages that the child inherited while it lives."""
        self._readers.forked()

    def became_child(self) -> None:
        """In the child: keep only this process's own end of a pipe, which shows that it lives."""
        self._readers.became_child()

    def close(self) -> None:
        self._readers.close()
        self.file.close()


class Region(Slot):
    """A region of the page file, and the era between two forks in which it was allocated."""

    __slots__ = ("era",)

    def __init__(self, file: PageFile, offset: int, nbytes: int, era: int) -> None:
        super().__init__(file, offset, nbytes)
        self.era = era


class ForkedReaders:
    """The living forked children: each holds an end of a pipe, as do its own children, until the
    kernel closes it at exit.
    """

    def __init__(self) -> None:
        self.era = 0
        """Number of forks so far."""
        self._living: dict[int, int] = {}
        """This process's ends of the pipes, by the era at whose end the child was forked."""
        self._pipe: tuple[int, int] | None = None
        self._unwatched = -1
        """The last era that ended with the fork of a child without a pipe, because too many files were open."""

    def may_read(self, era: int) -> bool:
        """Return whether a living child was forked in `era` or later, and so may read the regions allocated in it."""
        if era <= self._unwatched:
            return True
        if not self._living:
            return False
        poll = select.poll()
        for end in self._living.values():
            poll.register(end, 0)  # a hang-up is always reported
        ended = {end for end, _ in poll.poll(0)}
        for forked_in, end in list(self._living.items()):
            if end in ended:
                os.close(end)
                del self._living[forked_in]
        return any(forked_in >= era for forked_in in self._living)

    def about_to_fork(self) -> None:
        """Create the pipe if another file may be opened; otherwise the child always counts as alive."""
        with contextlib.suppress(OSError):
            self._pipe = os.pipe()

    def forked(self) -> None:
        """In the parent: keep the end for reading."""
        if self._pipe is not None:
            ours, theirs = self._pipe
            self._pipe = None
            os.close(theirs)
            self._living[self.era] = ours
        else:
            self._unwatched = self.era
        self.era += 1

    def became_child(self) -> None:
        """In the child: keep the end for writing, open until the child ends."""
        if self._pipe is not None:
            os.close(self._pipe[0])
            self._pipe = None
        self.close()

    def close(self) -> None:
        for end in self._living.values():
            os.close(end)
        self._living.clear()
