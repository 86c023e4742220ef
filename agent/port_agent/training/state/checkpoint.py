"""Where a job's persistent storages (weights, buffers, optimizer state) are stored, and their commits.

Each storage has three slots in one page file, except frozen weights, which are read in place from the user's files. A
commit record names, for every storage, the slot that holds its contents and their checksums; it becomes valid by an
atomic rename after everything it names is on the medium. Until the next commit, changed storages go to the slot that
neither the last commit nor the one before uses. So a power cut at any time leaves the last commit intact, and a decayed
block leaves the one before.
"""

import errno
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import xxhash

from port_agent.backend.raw_bytes import block, whole_bytes
from port_agent.paging.pager import CHUNK, ZEROS, PageError, PageFile, Pager, Slot, Transfer, make_directory, page_error
from port_agent.system.atomic_file import sync_directory, write_atomically
from port_agent.training.state.finite import check_state
from port_planner.base.direct_io import padded
from port_planner.base.errors import PortError
from port_planner.ir.bundle.manifest import FileRange

SLOTS = 3
_VERSION, _PACKED_VERSION, _ZEROS_VERSION, _FILES_VERSION = _VERSIONS = (1, 2, 3, 4)
"""Versions of the record.

Version 2 has chunks that are packed on the medium, version 3 chunks of zeros that are not stored, version 4
storages in the user's files.
"""


class CheckpointError(PortError):
    """There is no usable commit, or it belongs to another job."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The contents of a commit record besides the slots: the progress of training, and the state to continue from."""

    sequence: int
    step: int
    progress: Mapping[str, Any]


class _Version(msgspec.Struct):
    version: int


class _CommitRecord(_Version):
    job: str
    sequence: int
    step: int
    progress: dict[str, Any]
    slots: dict[str, tuple[int, int, list[int | None]]]
    """Current slot of each storage, its slot in the previous commit, and the checksums of the current contents."""
    packed: dict[str, list[int]] = {}
    """Bytes of each chunk on the medium, for each storage with packed or zero chunks (`Slot.packed_bytes`)."""
    in_files: list[str] = []
    """Storages that are read from the user's files; their slot is 0."""


class StateStore:
    """Persistent storages on flash, by key. See the module's docstring."""

    def __init__(
        self,
        directory: Path,
        sizes: Mapping[str, int],
        pager: Pager,
        *,
        job: str,
        finite: Mapping[str, torch.dtype] | None = None,
        item_bytes: Mapping[str, int] | None = None,
        in_files: Mapping[str, FileRange] = MappingProxyType({}),
    ) -> None:
        """`finite`: storages, and their types, that never reach flash with NaN or infinities in them.

        `item_bytes`: storages of floating-point numbers of this size whose chunks are packed on the medium. `in_files`:
        storages that never change and are read from these files, if the state is new; an existing state continues as it
        began. Raises CheckpointError if it began with such files and they are not given.
        """
        self.directory, self.pager, self.job = directory, pager, job
        self._finite, self._item_bytes = finite or {}, item_bytes or {}
        make_directory(directory)
        self.file = PageFile(directory / "state.pages")
        self.sizes: dict[str, int] = {}
        self._slots: dict[str, list[Slot]] = {}
        self._file_bytes = 0
        self._files: dict[str, PageFile] = {}
        """The user's files, by path."""
        self._in_files = self._begun_in(in_files)
        self._committed: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self.add(sizes)
        self._working: dict[str, int] = {}
        self.pending: dict[str, Transfer] = {}
        """Writes of storages' new contents that nobody has waited for yet."""
        self._damaged: set[tuple[str, int]] = set()
        """Slots, by key and place, that returned different data than was written."""
        self.sequence = 0
        self.damage = ""
        """The damage that `open` found in a newer record than the one that it used; empty if there was none."""

    def add(self, sizes: Mapping[str, int]) -> None:
        """Reserve space for new storages."""
        for key in sorted(sizes.keys() - self.sizes.keys()):
            step = padded(sizes[key])
            self.sizes[key] = sizes[key]
            self._committed[key] = self._before[key] = 0
            if key in self._in_files:
                part = self._in_files[key]
                self._slots[key] = [Slot(self._file_of(part), part.offset, sizes[key])]
                continue
            item_bytes = self._item_bytes.get(key, 0)
            self._slots[key] = [
                Slot(self.file, self._file_bytes + i * step, sizes[key], item_bytes=item_bytes) for i in range(SLOTS)
            ]
            self._file_bytes += SLOTS * step

    def _begun_in(self, in_files: Mapping[str, FileRange]) -> dict[str, FileRange]:
        """Return which storages are read from the user's files: those that were so far, or in a new state
        those on the pages' medium.
        """
        records = [record for record in self._records()[0] if record.job == self.job]
        if not records:
            return {key: part for key, part in in_files.items() if _same_medium(Path(part.path), self.directory)}
        keys = max(records, key=lambda record: record.sequence).in_files
        if not in_files.keys() >= set(keys):
            raise CheckpointError(
                f"{self.directory} began with the bundle's own weights; continue without others, or choose another "
                "--state-dir"
            )
        return {key: in_files[key] for key in keys}

    def _file_of(self, part: FileRange) -> PageFile:
        if part.path not in self._files:
            self._files[part.path] = PageFile(Path(part.path), read_only=True)
        return self._files[part.path]

    def lies_in_file(self, path: Path) -> bool:
        """Return whether any storage is read from this file of the user."""
        return str(path) in self._files

    # -- beginning

    def create(self, contents: Callable[[str], Iterable[torch.Tensor]], progress: Mapping[str, Any]) -> Commit:
        """Start a new state: `contents(key)` gives a storage's bytes in chunks of at most CHUNK, in order."""
        self._committed = dict.fromkeys(self._slots, 0)
        self._working.clear()
        self._damaged.clear()
        self.file.reserve(self._file_bytes)
        for key, slots in self._slots.items():
            start = 0
            for chunk in contents(key):
                nbytes = chunk.numel()
                if key in self._in_files:
                    slots[0].sums[start // CHUNK] = xxhash.xxh3_64_intdigest(chunk.numpy().data)
                else:
                    self.pager.wait(self.pager.write(slots[0], chunk.data_ptr(), chunk, start, nbytes))
                start += nbytes
        return self.commit(0, progress)

    def open(self) -> Commit | None:
        """Load the latest valid commit, whatever was written since; return None if there is none yet.

        Raises CheckpointError if the directory holds another job's state.
        """
        for transfer in self.pending.values():
            transfer.finished.wait()
        self.pending.clear()
        self.damage = ""
        records, others, damaged = self._records()
        if others and not records:
            raise CheckpointError(
                f"{self.directory} holds state of format {others[0]}, this agent reads {_VERSIONS[0]} to "
                f"{_VERSIONS[-1]}; continue with the version that wrote it, or choose another --state-dir"
            )
        for record in sorted(records, key=lambda r: -r.sequence):
            if record.job != self.job:
                raise CheckpointError(
                    f"{self.directory} holds the state of another job ({record.job[:12]}, this one is "
                    f"{self.job[:12]}); choose another --state-dir or empty that one"
                )
            if set(record.slots) != set(self.sizes):
                raise CheckpointError(f"{self.directory} holds other tensors than this job; choose another --state-dir")
            for key, (index, before, sums) in record.slots.items():
                self._committed[key], self._before[key] = index, before
                self._slots[key][index].sums = sums
                self._slots[key][index].packed_bytes = record.packed.get(key, [0] * len(sums))
            self._working.clear()
            self.sequence = record.sequence
            if (self.sequence + 1) % SLOTS in damaged:
                self.damage = f"{self._record_path(self.sequence + 1)} is damaged"
            self.file.reserve(self._file_bytes)
            return Commit(self.sequence, record.step, record.progress)
        if damaged:
            self.damage = f"all commit records in {self.directory} are damaged"
        return None

    def discard_latest(self) -> None:
        """Discard the latest commit because one of its blocks is damaged; `open` then finds the previous one."""
        try:
            self._record_path(self.sequence).unlink(missing_ok=True)
            sync_directory(self.directory)
        except OSError as error:
            raise page_error(error, self._record_path(self.sequence), "removed", 0) from error

    def _record_path(self, sequence: int) -> Path:
        return self.directory / f"commit.{sequence % SLOTS}"

    def _records(self) -> tuple[list[_CommitRecord], list[int], set[int]]:
        """Return the intact commit records, the versions of those of other agents, and the places of damaged ones."""
        sound, others, damaged = list[_CommitRecord](), list[int](), set[int]()
        for place in range(SLOTS):
            try:
                data = (self.directory / f"commit.{place}").read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""
            body, digest = data[:-8], data[-8:]
            if len(data) <= 8 or xxhash.xxh3_64_digest(body) != digest:
                damaged.add(place)
            elif (version := msgspec.msgpack.decode(body, type=_Version).version) not in _VERSIONS:
                others.append(version)
            else:
                sound.append(msgspec.msgpack.decode(body, type=_CommitRecord))
        return sound, others, damaged

    def avoid(self, offset: int) -> bool:
        """Never again write to the place of byte `offset` of the page file; return whether the last commit uses it."""
        for key, slots in self._slots.items():
            for index, slot in enumerate(slots):
                if slot.file is self.file and slot.offset <= offset < slot.offset + padded(slot.nbytes):
                    self._damaged.add((key, index))
                    return index == self._committed[key]
        return False

    # -- transfers

    def slot(self, key: str) -> Slot:
        """Return the slot that holds the current contents of a storage."""
        return self._slots[key][self._working.get(key, self._committed[key])]

    def working_slot(self, key: str) -> Slot:
        """Return the slot for new contents of a storage until the next commit.

        Raises PageError if no intact one is left.
        """
        if key not in self._working:
            sound = [
                i for i in range(len(self._slots[key])) if i != self._committed[key] and (key, i) not in self._damaged
            ]
            if not sound:
                raise PageError(
                    f"{self.file.path}: no intact block is left for {key}; copy your data off the medium and replace it"
                )
            self._working[key] = min(sound, key=lambda i: i == self._before[key])
        return self._slots[key][self._working[key]]

    def check(self, key: str, contents: torch.Tensor) -> None:
        """Raise NonFiniteError if bytes of a storage, about to be written, are not finite numbers."""
        if key in self._finite:
            check_state(key, contents, self._finite[key])

    def write(self, key: str, tensor: torch.Tensor) -> Transfer:
        """Queue a write of a storage's new contents.

        Raises NonFiniteError if they are not finite, CheckpointError if they are too few bytes.
        """
        contents = whole_bytes(tensor)
        if contents.numel() < self.sizes[key]:
            raise CheckpointError(
                f"{key} has {contents.numel()} bytes instead of {self.sizes[key]}; plan the job again"
            )
        self.check(key, contents[: self.sizes[key]])
        transfer = self.pager.send(self.working_slot(key), contents[: self.sizes[key]])
        self.pending[key] = transfer
        return transfer

    def wait(self, but: Set[str] = frozenset()) -> None:
        """Wait for the writes in progress, except those of the storages `but`; raise the PageError of a failed one."""
        for key in self.pending.keys() - but:
            self.pager.wait(self.pending.pop(key))

    def load(self, key: str, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return a storage's current contents as bytes, read at once (into the memory of `into` if it is given)."""
        slot = self.slot(key)
        target = block(slot.nbytes)
        if slot.nbytes:
            self.pager.wait(self.pager.read(slot, target.data_ptr(), target))
        if into is None:
            return target
        torch.empty(0, dtype=torch.uint8).set_(into.untyped_storage(), 0, (slot.nbytes,), (1,)).copy_(
            target[: slot.nbytes]
        )
        return into

    # -- commits

    def commit(self, step: int, progress: Mapping[str, Any]) -> Commit:
        """Make the current contents durable as the state after `step` steps."""
        self.wait()
        self.file.sync()
        now = {key: self._working.get(key, index) for key, index in self._committed.items()}
        sequence = self.sequence + 1
        slots = {k: (i, self._committed[k], self._slots[k][i].sums) for k, i in now.items()}
        packed = {k: lengths for k, i in now.items() if any(lengths := self._slots[k][i].packed_bytes)}
        zeros = any(ZEROS in lengths for lengths in packed.values())
        version = _ZEROS_VERSION if zeros else _PACKED_VERSION if packed else _VERSION
        if self._in_files:
            version = _FILES_VERSION
        record = _CommitRecord(version, self.job, sequence, step, dict(progress), slots, packed, sorted(self._in_files))
        body = msgspec.msgpack.encode(record)
        try:
            write_atomically(self._record_path(sequence), body + xxhash.xxh3_64_digest(body))
        except OSError as error:
            raise page_error(error, self._record_path(sequence), "written", len(body)) from error
        self._before, self._committed = self._committed, now
        self._working = {}
        self.sequence = sequence
        return Commit(sequence, step, progress)

    def close(self) -> None:
        for file in (self.file, *self._files.values()):
            file.close()


def _same_medium(path: Path, directory: Path) -> bool:
    """Return whether a file exists on the same file system as a directory."""
    return path.is_file() and path.stat().st_dev == directory.stat().st_dev
