"""A job on disk: one file that holds graphs, plans, costs, initial tensors and data.

It can compute; it cannot run code.

A zip archive: `manifest.json`, `graphs.msgpack`, `plans.msgpack`, `costs.msgpack`, and `tensors.safetensors` and
`data.safetensors`, both stored uncompressed so that single rows and chunks can be read in place. The manifest has the
hash of every other member (of the last two: of their headers) and of every tensor; `sums/train/0` holds the checksums
of the rows of `train/0` by blocks. Whatever is read is checked. Reading needs no torch and never unpacks to a path that
the archive names.
"""

import copy
import hashlib
import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgpack
import msgspec

from planner.ir.bundle import safetensors_io
from planner.ir.bundle.checksums import SUM_BYTES, block_sum, rows_per_block, tensor_hasher
from planner.ir.bundle.codec import MAX_WHOLE, Count, unpack_costs, unpack_graph, unpack_plan
from planner.ir.bundle.pruning import Pruning
from planner.ir.bundle.safetensors_io import Member
from planner.ir.costs import CostTable
from planner.ir.devices.cpu_teams import MOST_TEAMS, CpuTeam
from planner.ir.devices.kinds import CPU, MAX_NAME
from planner.ir.errors import ExitCode, PortError
from planner.ir.graph import ITEM_BYTES, MAX_STORAGE_BYTES, Role, storage_key, view_bytes
from planner.ir.operators import OPTIMIZERS
from planner.ir.plan import Plan

FORMAT = 2
"""Format 1 had no checksums of tensors."""
DEVICE_FORMAT = 3
"""Of a bundle whose step computes on another device than the CPU, or takes all micro-batches of an update at once; all others stay readable for agents that know none."""
PACKING_FORMAT = 4
"""Of a bundle that knows what packing takes, on any device: its plans may pack, and its pages may lie packed on flash."""
PRUNING_FORMAT = 5
"""Of a bundle whose weights are pruned while training: who does not know that would train other numbers."""
FILES_FORMAT = 6
"""Of a bundle that leaves weights in files beside it."""
PIECES_FORMAT = 7
"""Of a bundle whose graphs say which of their operators compute a piece of a chain."""
BUCKETS_FORMAT = 8
"""Of a bundle whose batches come in several shapes."""
BLOCKS_FORMAT = 9
"""Of a bundle with weights in blocks: who does not know that would look for the whole ones."""
PLACED_FORMAT = 10
"""Of a bundle whose operators are divided among devices: who does not know that would not bound what they hold of the host's memory."""
TEAMS_FORMAT = 11
"""Of a bundle whose operators run on several teams of threads: who does not know that would compute other bits."""
SUMMED_FORMAT = 12
"""Of a bundle whose chains sum over their pieces in another order: who does not know that would call its numbers plain PyTorch's."""
_FORMATS = (
    FORMAT, DEVICE_FORMAT, PACKING_FORMAT, PRUNING_FORMAT, FILES_FORMAT, PIECES_FORMAT, BUCKETS_FORMAT, BLOCKS_FORMAT,
    PLACED_FORMAT, TEAMS_FORMAT, SUMMED_FORMAT,
)  # fmt: skip
SUMS = "sums/"
"""Begins the name of the checksums of a column of data."""
MAX_HEADER_BYTES = 64 << 20
"""The largest compressed member measured is 0.4 MB; a larger one is damaged or hostile."""
MAX_MANIFEST_BYTES = 32 << 20
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zlib.error)
"""What the standard library raises for an archive that is damaged, encrypted, or of a version it does not know."""
_PACKED = ("graphs.msgpack", "plans.msgpack", "costs.msgpack")
MOST_THREADS = 1024
"""More than any processor has that trains here."""
Positive = Annotated[int, msgspec.Meta(ge=1, lt=MAX_WHOLE)]
_MATRIX = 2
"""Dimensions of what lies in blocks."""
TENSOR_MEMBERS = ("tensors.safetensors", "data.safetensors")


class BundleError(PortError):
    """A file that is not a bundle, or one that is damaged or hostile."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor lies in its storage."""

    dtype: str
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    offset: Count = 0


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """One entry of the frontier: a plan per graph and what the agent needs to choose among them."""

    ram_bytes: Count
    peak_bytes: Count
    seconds: float
    joules: float
    overhead_joules: float
    bound_joules: float | None
    written_bytes: Count
    strategy: str
    wear_joules: float = 0.0
    """What the written bytes cost of the flash's life; 0 in bundles from before that had a price."""
    device_ram_bytes: Count = 0
    """Of the memory of the device's own: budget, and the peak of the plan. 0 where it has none: `ram_bytes` is for both then."""
    device_peak_bytes: Count = 0

    @property
    def computing_peak_bytes(self) -> int:
        """The peak of the memory that operators compute in."""
        return self.device_peak_bytes or self.peak_bytes


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain PyTorch made of the first steps, where the bundle was made.

    `losses`: as hexadecimal floats. `processor`: machine and vector instructions. `checksums`: XXH3-64 of the bytes of
    parameters, buffers and optimizer state after those steps, by storage key. `placed`: what the recorded operators made of them one by
    one, each on the device that it was placed on, which no plain PyTorch does.
    """

    losses: tuple[str, ...] = ()
    threads: int = 0
    processor: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    placed: bool = False


@dataclass(frozen=True, slots=True)
class Recordings:
    """How often each graph was recorded, each time with the same operators, numbers and shapes.

    `varied`: what was different each time. `constants`: what the graphs read that is neither the model's, the
    optimizer's nor the batch's.
    """

    count: int = 1
    varied: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileRange:
    """Initial contents that lie in a file of the user's, from byte `offset`; `checksum`: XXH3-64 of these bytes."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]
    offset: Count
    nbytes: Count
    checksum: str


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """The storages, by key and in order, that hold a tensor in blocks of rows, and a frozen weight again in blocks of columns.

    `columns`: none where no graph reads it so.
    """

    rows: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedLimits:
    """What the plans were asked to keep to, so that later ones do as well. None: no limit.

    `step_s`, `written_bytes`: of one training step. `deadline_at`: Unix time. `charging`: the hours, as HH:MM, in which
    training was expected to run until then.
    """

    step_s: float | None = None
    written_bytes: Count | None = None
    deadline_at: float | None = None
    charging: tuple[str, str] | None = None


NO_LIMITS = PlannedLimits()

WHOLE_UPDATE = "update"
"""The name of a graph that takes all micro-batches of an update, one after the other's columns, and gives all their losses."""


UPDATING = ("step", "last", WHOLE_UPDATE)
"""Kinds of graphs that end with an update."""


def batch_kind(number: int, accumulate: int) -> str:
    """Return the kind of graph that the batch of this number runs, alone, in a job that sums the gradients of so many."""
    if accumulate == 1:
        return "step"
    place = number % accumulate
    return "first" if place == 0 else "last" if place == accumulate - 1 else "next"


def graph_name(kind: str, rows: int, size: "BucketSize", bucket: int = 0) -> str:
    """Return the name of the graph for batches of so many rows of a bucket; `kind`: "step", "first", "next", "last" or "eval"."""
    of_bucket = f"{kind}#{bucket}" if bucket else kind
    return of_bucket if rows == size.batch_size else f"{of_bucket}@{rows}"


_BUCKET_DIGITS = 4


def kind_of_graph(graph: str) -> str:
    """Return "step", "first", "next", "last", "eval" or WHOLE_UPDATE, by a graph's name."""
    return graph.partition("@")[0].partition("#")[0]


def first_shapes(graphs: Iterable[str]) -> dict[str, str]:
    """Return the first graph of each kind, by name, with its kind: that of full batches of the first bucket, where there are such."""
    found: dict[str, str] = {}
    for name in graphs:
        found.setdefault(kind_of_graph(name), name)
    return {name: kind for kind, name in found.items()}


def bucket_of(graph: str) -> int:
    """Return the bucket whose batches a graph takes, by its name."""
    _, _, number = graph.partition("@")[0].partition("#")
    return int(number) if number.isdecimal() and len(number) <= _BUCKET_DIGITS else 0


def data_part(graph: str) -> str:
    """Return what begins the names of the columns that a graph takes its batches from."""
    return "eval" if graph.startswith("eval") else train_part(bucket_of(graph))


def train_part(bucket: int) -> str:
    """Return what begins the names of a bucket's columns."""
    return f"train#{bucket}" if bucket else "train"


@dataclass(frozen=True, slots=True)
class BucketSize:
    """How many samples there are of one shape, and how many make a batch."""

    samples: Count
    batch_size: Positive

    def batches(self, *, drop_last: bool) -> int:
        """Return how many batches one pass over them makes."""
        full, rest = divmod(self.samples, self.batch_size)
        return full + (1 if rest and not drop_last else 0)


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself. Everything the supervisor needs, without torch.

    `graphs`: names such as "step", "step@1" (the last, short batch), "step#1" (of another bucket), "eval". `fills`: storages whose initial contents
    are one value. `layouts`: persistent storages by key. `result`: names of the tensors that training results in, as
    `model.state_dict()` has them, tied ones once; those that no graph uses lie in the bundle as `unused/NAME`. `schedule`: hyperparameters that change, by update.
    `allow_nonfinite`: training goes on with NaN or infinities.
    """

    name: str
    torch: str
    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)]
    seed: Count
    batch_size: Positive
    accumulate: Positive
    samples: Count
    drop_last: bool
    graphs: tuple[str, ...]
    batch: tuple[TensorLayout, ...]
    plans: tuple[PlanChoice, ...]
    optimizer: Mapping[str, Any]
    layouts: Mapping[str, TensorLayout]
    fills: Mapping[str, float]
    result: tuple[str, ...]
    device: str
    estimated: bool
    eval_samples: Count = 0
    schedule: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    allow_nonfinite: bool = False
    reference: Reference = field(default_factory=Reference)
    recordings: Recordings = field(default_factory=Recordings)
    limits: PlannedLimits = NO_LIMITS
    device_kind: str = CPU
    """What the step computes on; `device` is the name of the whole machine that it was planned for."""
    pruning: Pruning | None = None
    reordered: tuple[str, ...] = ()
    """Operators that add in another order each time there, as was allowed: then nothing is the same to the bit."""
    files: Mapping[str, FileRange] = field(default_factory=dict)
    """Of frozen weights that stay in the files they were loaded from, where they lie there, by storage key."""
    in_pieces: bool = False
    """Whether chains of operators run in pieces in a graph, which says so."""
    buckets: tuple[BucketSize, ...] = ()
    """Further samples, with rows of other shapes, beside the `samples` in batches of `batch_size`."""
    blocks: Mapping[str, WeightBlocks] = field(default_factory=dict)
    """Of tensors that the graphs have in blocks, by the key that a storage of the whole would have; it stands in `layouts`."""
    placed: tuple[str, ...] = ()
    """Kinds of devices that operators are divided among, as was asked for: bits are those of each on its own, of no device alone."""
    teams: Annotated[tuple[CpuTeam, ...], msgspec.Meta(max_length=MOST_TEAMS)] = ()
    """Teams of threads, from number 1, that operators of the CPU are divided among beside number 0, all `threads`."""
    summed_in_pieces: bool = False
    """Whether chains of a graph sum over their pieces in another order than the whole, as was allowed; the graph says which."""

    @property
    def format(self) -> int:
        """The oldest format that can say what this bundle holds."""
        if self.summed_in_pieces:
            return SUMMED_FORMAT
        if self.teams:
            return TEAMS_FORMAT
        if self.placed:
            return PLACED_FORMAT
        if self.blocks:
            return BLOCKS_FORMAT
        if self.buckets:
            return BUCKETS_FORMAT
        if self.in_pieces:
            return PIECES_FORMAT
        if self.files:
            return FILES_FORMAT
        if self.pruning is not None:
            return PRUNING_FORMAT
        older = self.device_kind == CPU and WHOLE_UPDATE not in self.graphs
        return FORMAT if older else DEVICE_FORMAT

    @property
    def state(self) -> tuple[str, ...]:
        """The keys of the tensors of the state, in order of name; what lies in blocks by the key of the whole."""
        parts = {key for blocks in self.blocks.values() for key in (*blocks.rows, *blocks.columns)}
        return tuple(sorted(self.layouts.keys() - parts))

    @property
    def main_graph(self) -> str:
        """The graph that most of the training runs, whose figures are those of a plan."""
        return WHOLE_UPDATE if WHOLE_UPDATE in self.graphs else self.graphs[0]

    def batches_of(self, graph: str) -> int:
        """Return how many batches a graph takes at once."""
        return self.accumulate if graph == WHOLE_UPDATE else 1

    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data; the last of each bucket may be short."""
        return sum(size.batches(drop_last=self.drop_last) for size in self.sizes)

    @property
    def sizes(self) -> tuple[BucketSize, ...]:
        """All buckets of samples."""
        return (BucketSize(self.samples, self.batch_size), *self.buckets)


# -- reading


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a bundle; cheap, and without torch."""
    with _open(path) as archive:
        return _manifest(_read_manifest_json(archive, path), path)


def manifest_hashes(path: Path) -> dict[str, str]:
    """Return the hashes in a manifest: SHA-256 of members by name, XXH3 of tensors by `MEMBER/NAME`.

    Raises BundleError where it has none.
    """
    with _open(path) as archive:
        return _hashes(_read_manifest_json(archive, path), path)


def _hashes(raw: Mapping[str, Any], path: Path) -> dict[str, str]:
    try:
        return msgspec.convert(raw.get("hashes"), dict[str, str])
    except msgspec.ValidationError as error:
        raise BundleError(f"{path}: the manifest has no hashes ({error}); make the bundle again") from error


class Bundle:
    """An open bundle. Graphs, costs and plans are read and checked at once.

    Tensors stay in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _open(path) as archive:
            raw = _read_manifest_json(archive, path)
            self.manifest = _manifest(raw, path)
            hashes = _hashes(raw, path)
            graphs, plans, costs = (_unpack(archive, name, hashes.get(name), path) for name in _PACKED)
            self.graphs = {k: unpack_graph(g) for k, g in _mapping(graphs, path).items()}
            self.costs = {k: unpack_costs(c) for k, c in _mapping(costs, path).items()}
            if not isinstance(plans, list):
                raise BundleError(f"{path}: expected a list of plans, found {str(plans)[:60]!r}")
            self.plans = [{k: unpack_plan(p) for k, p in _mapping(c, path).items()} for c in plans]
            self.id = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
            """Of everything in the bundle: the state of a job with another id belongs to another job."""
            self.tensors, data = (_index(archive, name, hashes, path) for name in TENSOR_MEMBERS)
            self.data = {k: m for k, m in data.items() if not k.startswith(SUMS)}
            self._sums = {k.removeprefix(SUMS): m for k, m in data.items() if k.startswith(SUMS)}
            self._hashes = hashes
        self._add_files()
        self._check(path)

    def _add_files(self) -> None:
        """Count what lies in other files among the tensors. Raises BundleError for what is named twice, or no such file."""
        for key, part in self.manifest.files.items():
            if key in self.tensors or key in self.manifest.fills:
                raise BundleError(
                    f"{self.path}: {key[:60]} lies in the bundle and in {part.path[:60]!r}; make it again"
                )
            if not Path(part.path).is_absolute() or "\0" in part.path:
                raise BundleError(f"{self.path}: {key[:60]} is to lie in {part.path[:60]!r}, which is no whole path")
            self.tensors[key] = Member(part.offset, part.nbytes, "uint8", (part.nbytes,))

    def with_plans(
        self, choices: tuple[PlanChoice, ...], plans: Sequence[Mapping[str, Plan]], costs: Mapping[str, CostTable]
    ) -> "Bundle":
        """Return the same bundle with other plans for the same graphs. Raises BundleError where they are for others."""
        other = copy.copy(self)
        other.manifest = replace(self.manifest, plans=choices)
        other.plans, other.costs = [dict(choice) for choice in plans], dict(costs)
        other._check(self.path)
        return other

    def _check(self, path: Path) -> None:
        names = set(self.graphs)
        if set(self.manifest.graphs) != names or names != set(self.costs):
            raise BundleError(f"{path}: manifest, graphs and costs name different graphs; make the bundle again")
        if len(self.plans) != len(self.manifest.plans) or not self.plans:
            raise BundleError(
                f"{path}: the manifest lists {len(self.manifest.plans)} plans, there are {len(self.plans)}"
            )
        for choice in self.plans:
            if set(choice) != names:
                raise BundleError(f"{path}: a plan is for the graphs {sorted(choice)}, the bundle has {sorted(names)}")
        sizes: dict[str, int] = {}
        for name, graph in self.graphs.items():
            if graph.device != self.manifest.device_kind:
                raise BundleError(
                    f"{path}: graph {name} is for the device {graph.device!r}, the manifest says "
                    f"{self.manifest.device_kind[:MAX_NAME]!r}; make the bundle again"
                )
            if max((op.team for op in graph.ops), default=0) > len(self.manifest.teams):
                raise BundleError(
                    f"{path}: graph {name} has operators for a team of threads that the manifest does not name"
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
                        raise BundleError(f"{path}: {storage.key} has {sizes[storage.key]} and {storage.nbytes} bytes")
        self._check_data(path)
        self._check_blocks(path)
        for name in self.manifest.result:
            key = self.result_key(name)
            if key not in self.manifest.layouts and key not in self.tensors:
                raise BundleError(f"{path}: the result names a tensor {name[:60]!r} that the bundle does not have")

    def _check_blocks(self, path: Path) -> None:
        """The blocks of a weight that lies in blocks are storages, row by row, and together as large as it."""
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
                    raise BundleError(f"{path}: the blocks of {key[:60]} do not make it up; make the bundle again")

    def _check_data(self, path: Path) -> None:
        """Every graph has a column of data for each tensor of its batch, and each its checksums.

        All of one length.
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
                raise BundleError(f"{path}: graph {name} gives {len(graph.aux) + 1} losses for {batches} batches")
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
            raise BundleError(f"{path}: {key} lacks checksums for its {blocks} blocks of rows; make the bundle again")

    def result_key(self, name: str) -> str:
        """Return the key of the persistent storage that holds a tensor of the result.

        `unused/NAME` where none does.
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
        """Yield a tensor's bytes in pieces of `chunk_bytes`.

        Raises BundleError at the end where they are not as written.
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
                piece = self._read(stream.fileno(), member, start, chunk_bytes)
                hasher.update(piece)
                yield piece
        if hasher.hexdigest() != self._hashes[f"{TENSOR_MEMBERS[0]}/{key}"]:
            raise BundleError(
                f"{self.path}: the tensor {key} is damaged (its checksum differs); copy or make the bundle again"
            )

    def row(self, fd: int, key: str, row: int) -> bytes:
        """Return one row of a column of data; `fd` is an open descriptor of the file.

        Raises BundleError where there is no such row or its block is not as it was written.
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
                f"{self.path}: {key} is damaged near row {row} (its checksum differs); copy or make the bundle again"
            )
        return data[inside * width : (inside + 1) * width]

    def _read(self, fd: int, member: Member, start: int, nbytes: int) -> bytes:
        """Return up to `nbytes` of a tensor from byte `start`; raise BundleError where the file ends before."""
        data = os.pread(fd, min(nbytes, member.nbytes - start), member.offset + start)
        if len(data) != min(nbytes, member.nbytes - start):
            raise BundleError(f"{self.path} ends in the middle of a tensor; copy or make the bundle again")
        return data


def _is_part(part: TensorLayout, whole: TensorLayout, dimension: int) -> bool:
    """Say whether a matrix can be rows (dimension 0) or columns of another."""
    if len(part.shape) != len(whole.shape) or len(whole.shape) != _MATRIX or part.dtype != whole.dtype:
        return False
    row_major = all(layout.offset == 0 and layout.stride == (layout.shape[1], 1) for layout in (part, whole))
    return row_major and part.shape[1 - dimension] == whole.shape[1 - dimension]


def contents_of_file(key: str, part: FileRange, chunk_bytes: int) -> Iterator[bytes]:
    """Yield a tensor's bytes from a safetensors file, in pieces of `chunk_bytes`.

    Raises BundleError where the file is away, is none of weights (a bundle gets at no others of who opens it), or holds
    other bytes there than when the bundle was made.
    """
    remedy = "put back the file that the bundle was made from, or plan the job again"
    hasher = tensor_hasher()
    try:
        fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BundleError(f"{part.path}, which has {key}, cannot be read: {error.strerror}; {remedy}") from error
    with open(fd, "rb", buffering=0) as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or part.offset < safetensors_io.payload_offset(stream, status.st_size):
            raise BundleError(f"{part.path}, which should have {key}, is no file of weights; {remedy}")
        for start in range(0, part.nbytes, chunk_bytes):
            wanted = min(chunk_bytes, part.nbytes - start)
            piece = os.pread(fd, wanted, part.offset + start)
            if len(piece) != wanted:
                raise BundleError(f"{part.path} ends before {key}, which it had when the bundle was made; {remedy}")
            hasher.update(piece)
            yield piece
    if hasher.hexdigest() != part.checksum:
        raise BundleError(f"{part.path} was changed since the bundle was made: {key} has another checksum; {remedy}")


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise BundleError(
            f"{path} does not exist; make it with: port-agent plan train.py --ram 300M -o {path}"
        ) from None
    except _ZIP_ERRORS as error:
        raise BundleError(f"{path} is not a bundle ({error}); make it with port-agent plan") from error


def _member_bytes(archive: zipfile.ZipFile, name: str, limit: int, path: Path) -> bytes:
    try:
        info = archive.getinfo(name)
        if info.file_size > limit:
            raise BundleError(f"{path}: {name} claims {info.file_size} bytes; the limit is {limit}")
        with archive.open(info) as stream:
            data = stream.read(limit + 1)
    except KeyError:
        raise BundleError(f"{path} has no {name}; it is not a bundle, or damaged") from None
    except _ZIP_ERRORS as error:
        raise BundleError(f"{path}: {name} cannot be read ({error}); copy or make the bundle again") from error
    if len(data) > limit:
        raise BundleError(f"{path}: {name} unpacks to more than {limit} bytes")
    return data


def _read_manifest_json(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    data = _member_bytes(archive, "manifest.json", MAX_MANIFEST_BYTES, path)
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: the manifest is no JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("format") not in _FORMATS:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise BundleError(
            f"{path} has format {found}, this version reads {', '.join(map(str, _FORMATS))}; plan the job again with port-agent plan"
        )
    return raw


def _unpack(archive: zipfile.ZipFile, name: str, expected: Any, path: Path) -> Any:
    data = _member_bytes(archive, name, MAX_HEADER_BYTES, path)
    if hashlib.sha256(data).hexdigest() != expected:
        raise BundleError(f"{path}: {name} is damaged (SHA-256 differs); copy or make the bundle again")
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise BundleError(f"{path}: {name} is no msgpack ({error})") from error


def _mapping(data: Any, path: Path) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise BundleError(f"{path}: expected a table of graphs, found {str(data)[:60]!r}")
    return data


def _manifest(raw: Mapping[str, Any], path: Path) -> Manifest:
    try:
        manifest = msgspec.convert(raw, Manifest)
        _check_optimizer(manifest.optimizer)
        for layout in (*manifest.batch, *manifest.layouts.values()):
            if layout.dtype not in ITEM_BYTES:
                raise ValueError(f"dtype {layout.dtype!r}")
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise BundleError(f"{path}: the manifest is incomplete or wrong ({error}); make the bundle again") from error
    return manifest


def _number(hyperparameter: Any) -> Any:
    """Return a hyperparameter, or the number of one that is a tensor."""
    return hyperparameter.get("number") if isinstance(hyperparameter, dict) else hyperparameter


def _check_optimizer(data: Mapping[str, Any]) -> None:
    if (recorded := data.get("recorded")) is not None:
        _check_recorded(recorded)
        if not isinstance(data["name"], str) or not isinstance(data["groups"], list):
            raise ValueError("the optimizer has no name or parameter groups")
        return
    if data["name"] not in OPTIMIZERS:
        raise ValueError(f"the optimizer is {str(data['name'])[:60]!r}")
    if not data["groups"] or not all(
        isinstance(g, dict) and isinstance(_number(g["lr"]), int | float) for g in data["groups"]
    ):
        raise ValueError("the optimizer has no parameter groups")


def _check_recorded(data: Mapping[str, Any]) -> None:
    """Raise ValueError where these are no numbers of an optimizer, as `planner.ir.lowering.optimizer_scalars` reads them."""
    for scalar in data["numbers"]:
        each = scalar if isinstance(scalar, list) else [scalar]
        if not each or not all(isinstance(number, float) for number in each):
            raise ValueError(f"a number of the optimizer is {str(scalar)[:60]}")
    if not (data["updates"] is None or (isinstance(data["updates"], int) and data["updates"] > 0)):
        raise ValueError(f"the optimizer has numbers of {str(data['updates'])[:60]} updates")


def _index(archive: zipfile.ZipFile, name: str, hashes: Mapping[str, str], path: Path) -> dict[str, Member]:
    """Return where each tensor of a safetensors member lies in the file, every number checked."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise BundleError(f"{path} has no {name}; it is not a bundle, or damaged") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_STORAGE_BYTES:
        raise BundleError(f"{path}: {name} is compressed or too large; make the bundle with port-agent plan")
    try:
        with archive.open(info) as stream:
            header = safetensors_io.read_header(stream, info.file_size)
        if hashlib.sha256(header).hexdigest() != hashes.get(name):
            raise BundleError(f"{path}: {name} is damaged (SHA-256 differs); copy or make the bundle again")
        found = safetensors_io.index(header, info.file_size, _payload_offset(archive, info))
    except (*_ZIP_ERRORS, struct.error, KeyError) as error:
        raise BundleError(f"{path}: {name} is damaged ({error}); copy or make the bundle again") from error
    if {f"{name}/{key}" for key in found} != {key for key in hashes if key.startswith(f"{name}/")}:
        raise BundleError(f"{path}: {name} has other tensors than the manifest has checksums; make the bundle again")
    return found


def _payload_offset(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: behind its local header (30 bytes, name, extra field)."""
    stream = archive.fp
    if stream is None:
        raise ValueError("the archive is closed")
    stream.seek(info.header_offset)
    header = stream.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + int(name_length) + int(extra_length)
