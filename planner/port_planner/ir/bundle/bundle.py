"""A job on disk: one file that holds graphs, plans, costs, initial tensors and data.

It can compute, but it cannot run code.

A zip archive: `manifest.json`, `graphs.msgpack`, `plans.msgpack`, `costs.msgpack`, and `tensors.safetensors` and
`data.safetensors`, both stored uncompressed so that single rows and chunks can be read in place. The manifest has the
hash of every other member (of the last two: of their headers) and of every tensor; `sums/train/0` holds the checksums
of the rows of `train/0` by blocks. All contents are checked when they are read. Reading needs no torch, and never
unpacks to a path that the archive names.
"""

import copy
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from port_planner.ir.bundle import safetensors_io
from port_planner.ir.bundle.archive import hashes_of, manifest_json, open_archive, tensor_index, unpacked_member
from port_planner.ir.bundle.checksums import SUM_BYTES, block_sum, columns_digest, rows_per_block, tensor_hasher
from port_planner.ir.bundle.codec import unpack_costs, unpack_graph, unpack_plan
from port_planner.ir.bundle.manifest import (
    WHOLE_UPDATE,
    BundleError,
    FileRange,
    Manifest,
    PlanChoice,
    TensorLayout,
    bucket_of,
    data_part,
    manifest_of,
    train_part,
)
from port_planner.ir.bundle.safetensors_io import Member
from port_planner.ir.costs import CostTable
from port_planner.ir.device_kinds import MAX_NAME
from port_planner.ir.graph import Role, storage_key, view_bytes
from port_planner.ir.plan import Plan

SUMS = "sums/"
"""Prefix of the names of the checksums of a data column."""
_PACKED = ("graphs.msgpack", "plans.msgpack", "costs.msgpack")
_CHECKED_BYTES = 1 << 20
"""Bytes per read when everything is checked."""
_MATRIX = 2
"""Number of dimensions of tensors that are stored in blocks."""
TENSOR_MEMBERS = ("tensors.safetensors", "data.safetensors")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a bundle; cheap, and without torch."""
    with open_archive(path) as archive:
        return manifest_of(manifest_json(archive, path), path)


def manifest_hashes(path: Path) -> dict[str, str]:
    """Return the hashes in a manifest: SHA-256 of members by name, XXH3 of tensors by `MEMBER/NAME`.

    Raises BundleError if it has none.
    """
    with open_archive(path) as archive:
        return hashes_of(manifest_json(archive, path), path)


class Bundle:
    """An open bundle. Graphs, costs and plans are read and checked at once.

    Tensors stay in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_archive(path) as archive:
            raw = manifest_json(archive, path)
            self.manifest = manifest_of(raw, path)
            hashes = hashes_of(raw, path)
            graphs, plans, costs = (unpacked_member(archive, name, hashes.get(name), path) for name in _PACKED)
            self.graphs = {k: unpack_graph(g) for k, g in _mapping(graphs, path).items()}
            self.costs = {k: unpack_costs(c) for k, c in _mapping(costs, path).items()}
            if not isinstance(plans, list):
                raise BundleError(f"{path}: expected a list of plans, found {str(plans)[:60]!r}")
            self.plans = [{k: unpack_plan(p) for k, p in _mapping(c, path).items()} for c in plans]
            self.id = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
            """Identity of the bundle's whole content; the state of a job with another id belongs to another job."""
            self.tensors, data = (tensor_index(archive, name, hashes, path) for name in TENSOR_MEMBERS)
            self.data = {k: m for k, m in data.items() if not k.startswith(SUMS)}
            self._sums = {k.removeprefix(SUMS): m for k, m in data.items() if k.startswith(SUMS)}
            self._hashes = hashes
        self._add_files()
        self._check(path)

    def _add_files(self) -> None:
        """Add tensors in other files. Raises BundleError for a duplicate name or an invalid path."""
        for key, part in self.manifest.files.items():
            if key in self.tensors or key in self.manifest.fills:
                raise BundleError(
                    f"{self.path}: {key[:60]} is both in the bundle and in {part.path[:60]!r}; recreate it"
                )
            if not Path(part.path).is_absolute() or "\0" in part.path:
                raise BundleError(
                    f"{self.path}: {key[:60]} refers to {part.path[:60]!r}, which is not a path within the bundle"
                )
            self.tensors[key] = Member(part.offset, part.nbytes, "uint8", (part.nbytes,))

    def with_plans(
        self, choices: tuple[PlanChoice, ...], plans: Sequence[Mapping[str, Plan]], costs: Mapping[str, CostTable]
    ) -> "Bundle":
        """Return the same bundle with other plans for the same graphs.

        Raises BundleError if the plans are for different graphs.
        """
        other = copy.copy(self)
        other.manifest = replace(self.manifest, plans=choices)
        other.plans, other.costs = [dict(choice) for choice in plans], dict(costs)
        other._check(self.path)
        return other

    def _check(self, path: Path) -> None:
        names = set(self.graphs)
        if set(self.manifest.graphs) != names or names != set(self.costs):
            raise BundleError(f"{path}: manifest, graphs and costs name different graphs; recreate the bundle")
        if len(self.plans) != len(self.manifest.plans) or not self.plans:
            raise BundleError(
                f"{path}: the manifest lists {len(self.manifest.plans)} plans, but the bundle has {len(self.plans)}"
            )
        for choice in self.plans:
            if set(choice) != names:
                raise BundleError(f"{path}: a plan is for the graphs {sorted(choice)}, the bundle has {sorted(names)}")
        sizes: dict[str, int] = {}
        for name, graph in self.graphs.items():
            if graph.device != self.manifest.device_kind:
                raise BundleError(
                    f"{path}: graph {name} is for the device {graph.device!r}, the manifest says "
                    f"{self.manifest.device_kind[:MAX_NAME]!r}; recreate the bundle"
                )
            if max((op.team for op in graph.ops), default=0) > len(self.manifest.teams):
                raise BundleError(
                    f"{path}: graph {name} has operators for a thread team that the manifest does not list"
                )
            if len(self.costs[name].ops) != len(graph.ops):
                raise BundleError(
                    f"{path}: graph {name} has {len(graph.ops)} ops, its costs {len(self.costs[name].ops)}"
                )
            for storage in graph.storages:
                self._check_initial(path, storage.key, storage.nbytes, persistent=storage.persistent)
                if storage.persistent:
                    self._check_layout(path, storage.key, storage.nbytes)
                    if sizes.setdefault(storage.key, storage.nbytes) != storage.nbytes:
                        raise BundleError(
                            f"{path}: {storage.key} has two different sizes, {sizes[storage.key]} and {storage.nbytes} "
                            "bytes"
                        )
        self._check_data(path)
        self._check_blocks(path)
        for name in self.manifest.result:
            key = self.result_key(name)
            if key not in self.manifest.layouts and key not in self.tensors:
                raise BundleError(f"{path}: the result names a tensor {name[:60]!r} that the bundle does not have")

    def _check_blocks(self, path: Path) -> None:
        """Raise BundleError unless the blocks of each weight are storages that cover it row by row."""
        layouts = self.manifest.layouts
        for key, blocks in self.manifest.blocks.items():
            whole = layouts.get(key)
            for dimension, keys in enumerate((blocks.rows, blocks.columns)):
                there = self.tensors.keys() | self.manifest.fills.keys()
                parts = [layouts[k] for k in keys if k in layouts and k in there]
                fit = (
                    whole is not None and len(parts) == len(keys) and all(_is_part(p, whole, dimension) for p in parts)
                )
                if not fit or (keys and whole and sum(p.shape[dimension] for p in parts) != whole.shape[dimension]):
                    raise BundleError(f"{path}: the blocks of {key[:60]} do not cover it; recreate the bundle")

    def _check_data(self, path: Path) -> None:
        """Check that every graph has a column of data for each tensor of its batch, of one
        length and with checksums.
        """
        sizes = self.manifest.sizes
        counts = {"eval": self.manifest.eval_samples}
        wanted: dict[str, int] = {}
        for name, graph in self.graphs.items():
            part, bucket = data_part(name), bucket_of(name)
            if bucket >= len(sizes):
                raise BundleError(f"{path}: graph {name[:60]} is for bucket {bucket}, the manifest has {len(sizes)}")
            counts.setdefault(part, sizes[bucket].samples)
            found = sum(key.startswith(f"{part}/") for key in self.data)
            batches = self.manifest.batches_of(name)
            if found * batches != len(graph.batch):
                raise BundleError(f"{path}: graph {name} takes {len(graph.batch)} columns of data, there are {found}")
            if name == WHOLE_UPDATE and len(graph.aux) != batches - 1:
                raise BundleError(f"{path}: graph {name} returns {len(graph.aux) + 1} losses for {batches} batches")
            wanted |= {f"{part}/{i}": counts[part] for i in range(found)}
        for bucket in range(len(sizes)) if self.manifest.buckets else ():
            columns = sum(key.startswith(f"{train_part(bucket)}/") for key in wanted)
            if columns != len(self.manifest.batch):
                raise BundleError(
                    f"{path}: bucket {bucket} has {columns} columns of data, a batch {len(self.manifest.batch)}"
                )
        if not set(wanted) == set(self.data) == set(self._sums):
            raise BundleError(f"{path}: the data's columns are {sorted(self.data)}, the graphs take {sorted(wanted)}")
        for key, count in wanted.items():
            self._check_column(path, key, count)

    def _check_column(self, path: Path, key: str, count: int) -> None:
        column = self.data[key]
        if not count or column.shape[:1] != (count,):
            raise BundleError(f"{path}: {key} has the shape {list(column.shape)}, the manifest says {count} samples")
        blocks = -(-count // rows_per_block(column.nbytes // count)) if column.nbytes else 0
        if self._sums[key].nbytes != blocks * SUM_BYTES:
            raise BundleError(f"{path}: {key} lacks checksums for its {blocks} blocks of rows; recreate the bundle")

    def result_key(self, name: str) -> str:
        """Return the key of the persistent storage that contains a tensor of the result.

        The key is `unused/NAME` if no storage contains it.
        """
        keys = (storage_key(Role.PARAMETER, name), storage_key(Role.BUFFER, name))
        return next((k for k in keys if k in self.manifest.layouts), f"unused/{name}")

    def _check_initial(self, path: Path, key: str, nbytes: int, *, persistent: bool) -> None:
        wanted = persistent or key.startswith("constant/")
        if not wanted or key in self.manifest.fills:
            return
        member = self.tensors.get(key)
        if member is None or member.nbytes != nbytes:
            found = "none" if member is None else f"{member.nbytes}"
            raise BundleError(f"{path}: the initial contents of {key} should have {nbytes} bytes, found {found}")

    def _check_layout(self, path: Path, key: str, nbytes: int) -> None:
        layout = self.manifest.layouts.get(key)
        if layout is None or view_bytes(layout.dtype, layout.shape, layout.stride, layout.offset) > nbytes:
            raise BundleError(f"{path}: the layout of {key} is missing or does not fit its {nbytes} bytes")

    def contents(self, key: str, chunk_bytes: int) -> Iterator[bytes]:
        """Yield a tensor's bytes in chunks of `chunk_bytes`.

        Raises BundleError at the end if they differ from what was written.
        """
        if key in self.manifest.blocks:
            for rows in self.manifest.blocks[key].rows:
                yield from self.contents(rows, chunk_bytes)
            return
        elsewhere = self.manifest.files.get(key)
        if elsewhere is not None:
            yield from contents_of_file(key, elsewhere, chunk_bytes)
            return
        member, hasher = self.tensors[key], tensor_hasher()
        with open(self.path, "rb") as stream:
            for start in range(0, member.nbytes, chunk_bytes):
                tile = self._read(stream.fileno(), member, start, chunk_bytes)
                hasher.update(tile)
                yield tile
        if hasher.hexdigest() != self._hashes[f"{TENSOR_MEMBERS[0]}/{key}"]:
            raise BundleError(
                f"{self.path}: the tensor {key} is damaged (its checksum differs); copy it again or recreate it"
            )

    def checksum(self, key: str) -> str:
        """Return a value that identifies a tensor's initial bytes, regardless of where and in
        which blocks they are stored.

        Raises BundleError for damaged ones; only those of a tensor in blocks are read.
        """
        blocks = self.manifest.blocks.get(key)
        parts = (key,) if blocks is None else blocks.rows
        if parts[0] in self.manifest.fills:
            return f"all {self.manifest.fills[parts[0]]!r}"
        if blocks is None:
            elsewhere = self.manifest.files.get(key)
            return elsewhere.checksum if elsewhere is not None else self._hashes[f"{TENSOR_MEMBERS[0]}/{key}"]
        hasher = tensor_hasher()
        for tile in self.contents(key, _CHECKED_BYTES):
            hasher.update(tile)
        return hasher.hexdigest()

    def row(self, fd: int, key: str, row: int) -> bytes:
        """Return one row of a column of data; `fd` is an open descriptor of the file.

        Raises BundleError if there is no such row, or if its block differs from what was written.
        """
        column = self.data[key]
        if not 0 <= row < column.shape[0]:
            raise BundleError(f"{self.path}: row {row} of {key} does not exist, the data has {column.shape[0]}")
        width = column.nbytes // column.shape[0]
        if not width:
            return b""
        block, inside = divmod(row, rows_per_block(width))
        first = (row - inside) * width
        data = self._read(fd, column, first, rows_per_block(width) * width)
        if block_sum(data) != self._read(fd, self._sums[key], block * SUM_BYTES, SUM_BYTES):
            raise BundleError(
                f"{self.path}: {key} is damaged near row {row} (its checksum differs); copy it again or recreate it"
            )
        return data[inside * width : (inside + 1) * width]

    def data_digest(self) -> str:
        """Return the digest of the columns used for training, without reading them. Raises OSError."""
        trained = [key for key in self._sums if not key.startswith("eval")]
        with self.path.open("rb") as stream:
            read = {key: self._read(stream.fileno(), self._sums[key], 0, self._sums[key].nbytes) for key in trained}
        return columns_digest(read)

    def check_contents(self) -> None:
        """Read every tensor and every block of rows. Raises BundleError for the first one that is damaged."""
        for key in self.tensors:
            for _ in self.contents(key, _CHECKED_BYTES):
                pass
        with open(self.path, "rb") as stream:
            for key, column in self.data.items():
                width = column.nbytes // column.shape[0]
                for row in range(0, column.shape[0], rows_per_block(width)) if width else ():
                    self.row(stream.fileno(), key, row)

    def _read(self, fd: int, member: Member, start: int, nbytes: int) -> bytes:
        """Return up to `nbytes` of a tensor from byte `start`; raise BundleError if the file ends earlier."""
        data = os.pread(fd, min(nbytes, member.nbytes - start), member.offset + start)
        if len(data) != min(nbytes, member.nbytes - start):
            raise BundleError(f"{self.path} ends in the middle of a tensor; copy it again or recreate it")
        return data


def _is_part(part: TensorLayout, whole: TensorLayout, dimension: int) -> bool:
    """Return whether a matrix can be rows (dimension 0) or columns of another one."""
    if len(part.shape) != len(whole.shape) or len(whole.shape) != _MATRIX or part.dtype != whole.dtype:
        return False
    row_major = all(layout.offset == 0 and layout.stride == (layout.shape[1], 1) for layout in (part, whole))
    return row_major and part.shape[1 - dimension] == whole.shape[1 - dimension]


def contents_of_file(key: str, part: FileRange, chunk_bytes: int) -> Iterator[bytes]:
    """Yield a tensor's bytes from a safetensors file, in chunks of `chunk_bytes`.

    Raises BundleError if the file is missing, is not a weight file (a bundle may not read any other file), or has
    changed since the bundle was created.
    """
    remedy = "restore the file that the bundle was made from, or plan the job again"
    hasher = tensor_hasher()
    try:
        fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BundleError(f"{part.path}, which has {key}, cannot be read: {error.strerror}; {remedy}") from error
    with open(fd, "rb", buffering=0) as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or part.offset < safetensors_io.payload_offset(stream, status.st_size):
            raise BundleError(f"{part.path}, which should have {key}, is not a valid file of weights; {remedy}")
        for start in range(0, part.nbytes, chunk_bytes):
            wanted = min(chunk_bytes, part.nbytes - start)
            tile = os.pread(fd, wanted, part.offset + start)
            if len(tile) != wanted:
                raise BundleError(
                    f"{part.path} ends before {key}, which it contained when the bundle was created; {remedy}"
                )
            hasher.update(tile)
            yield tile
    if hasher.hexdigest() != part.checksum:
        raise BundleError(
            f"{part.path} has changed since the bundle was created: the checksum of {key} differs; {remedy}"
        )


def _mapping(data: Any, path: Path) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise BundleError(f"{path}: expected a table of graphs, found {str(data)[:60]!r}")
    return data
