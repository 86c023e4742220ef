"""A bundle's description of itself: plans and limits, tensor layouts, comparisons made, and names of graphs.

It contains everything that the supervisor needs, and does not need torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from port_planner.base.bounds import MAX_WHOLE, Count
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.allowed_operators import OPTIMIZERS
from port_planner.ir.arithmetic import Arithmetic
from port_planner.ir.bundle.pruning_schedule import Pruning
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.cpu_teams import MAX_TEAMS, CpuTeam
from port_planner.ir.graph import ITEM_BYTES
from port_planner.ir.known_steps import KnownSteps
from port_planner.ir.plateau import PlateauRule

FORMAT = 2
"""Oldest readable format; format 1 had no checksums of tensors."""
DEVICE_FORMAT = 3
"""Format for steps on devices other than the CPU, or that take all micro-batches of an update at once.

Other bundles stay readable for older agents.
"""
PACKING_FORMAT = 4
"""Format for bundles with packing costs, on any device: their plans may pack, and their
pages may be packed on flash.
"""
PRUNING_FORMAT = 5
"""Format for bundles whose weights are pruned during training: older agents would train different numbers."""
FILES_FORMAT = 6
"""Format for bundles that leave weights in files next to them."""
TILES_FORMAT = 7
"""Format for bundles whose graphs mark the operators that compute a tile of a chain."""
BUCKETS_FORMAT = 8
"""Format for bundles with batches of several shapes."""
BLOCKS_FORMAT = 9
"""Format for bundles with weights in blocks: older agents would look for the whole ones."""
PLACED_FORMAT = 10
"""Format for bundles with operators divided among devices: older agents would not limit the host memory they hold."""
TEAMS_FORMAT = 11
"""Format for bundles whose operators run on several thread teams: older agents would compute different bits."""
SUMMED_FORMAT = 12
"""Format for bundles whose chains sum over tiles in another order: older agents would claim plain PyTorch's numbers."""
NUMBERS_FORMAT = 13
"""Format for bundles with numbers that change from batch to batch: older agents have none for their graphs."""
PROXIMAL_FORMAT = 14
"""Format for bundles with a proximal term: older agents would hold a round's weights near those of the bundle."""
PLATEAU_FORMAT = 15
"""Format for bundles whose learning rates follow the losses: older agents would keep the first ones."""
FORMATS = (
    FORMAT, DEVICE_FORMAT, PACKING_FORMAT, PRUNING_FORMAT, FILES_FORMAT, TILES_FORMAT, BUCKETS_FORMAT, BLOCKS_FORMAT,
    PLACED_FORMAT, TEAMS_FORMAT, SUMMED_FORMAT, NUMBERS_FORMAT, PROXIMAL_FORMAT, PLATEAU_FORMAT,
)  # fmt: skip
MAX_THREADS = 1024
"""Largest number of threads, more than any processor has on which this trains."""
Positive = Annotated[int, msgspec.Meta(ge=1, lt=MAX_WHOLE)]


class BundleError(PortError):
    """The file is not a bundle, or it is damaged or hostile."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layout of a tensor in its storage."""

    dtype: str
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    offset: Count = 0


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """One entry of the frontier: a plan per graph, and the figures for choosing among them."""

    ram_bytes: Count
    peak_bytes: Count
    seconds: float
    joules: float
    overhead_joules: float
    bound_joules: float | None
    written_bytes: Count
    strategy: str
    wear_joules: float = 0.0
    """Wear of the written bytes, in joules; 0 in bundles older than its price."""
    device_ram_bytes: Count = 0
    """Budget and the plan's peak in the device's own memory; 0 if it has none, in which
    case `ram_bytes` covers both.
    """
    device_peak_bytes: Count = 0

    @property
    def computing_peak_bytes(self) -> int:
        """The peak of the memory in which operators compute."""
        return self.device_peak_bytes or self.peak_bytes


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """Results of plain PyTorch's first steps on the machine that created the bundle.

    `losses`: as hexadecimal floats. `processor`: machine and vector instructions. `checksums`: XXH3-64 of the bytes of
    parameters, buffers and optimizer state after those steps, by storage key. `placed`: the results of running the
    recorded operators individually, each on its assigned device, which plain PyTorch does not do. `arithmetic`: torch's
    settings before the first of them; None if the bundle does not record them.
    """

    losses: tuple[str, ...] = ()
    threads: int = 0
    processor: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    placed: bool = False
    arithmetic: Arithmetic | None = None


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Results of the script's first updates, run alone: in a process without recorder, modes or patched functions.

    `rows`: number of each bucket's first samples that it used, so that epochs end. `generators`: XXH3-64 of the states
    of torch's default generators after it, by kind of device. `unchecked`: why there was no such run; "" if there was
    one. `unchanged`: number of further updates whose operators, run without contents, were checked to be the same.
    """

    updates: Count = 0
    rows: tuple[Count, ...] = ()
    results: ExpectedResults = field(default_factory=ExpectedResults)
    generators: Mapping[str, str] = field(default_factory=dict)
    unchecked: str = "the bundle is from before there was one"
    unchanged: Count = 0


@dataclass(frozen=True, slots=True)
class Recordings:
    """How often each graph was recorded, each time with the same operators, numbers and shapes.

    `varied`: differences between the runs. `constants`: what the graphs read that is neither the model's, the
    optimizer's nor the batch's.
    """

    count: int = 1
    varied: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileRange:
    """Initial contents in a user's file, from byte `offset`; `checksum`: XXH3-64 of these bytes."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]
    offset: Count
    nbytes: Count
    checksum: str


@dataclass(frozen=True, slots=True)
class ProximalTerm:
    """A term that holds weights near those with which a run began: its factor and, for each storage of `starts` by key,
    the name in the result of the weights that it copies.
    """

    mu: Annotated[float, msgspec.Meta(gt=0.0)]
    starts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """The storages, by key and in order, that contain a tensor in blocks of rows, and a frozen weight
    again in blocks of columns.

    `columns`: empty if no graph reads it that way.
    """

    rows: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedLimits:
    """The limits of the plans, which later plans also keep. None: no limit.

    `step_s`, `written_bytes`: bytes written in one training step. `deadline_at`: Unix time. `charging`: the hours, as
    HH:MM, in which training was expected to run until then.
    """

    step_s: float | None = None
    written_bytes: Count | None = None
    deadline_at: float | None = None
    charging: tuple[str, str] | None = None


NO_LIMITS = PlannedLimits()
WHOLE_UPDATE = "update"
"""The name of a graph that processes all micro-batches of an update, with their columns in sequence, and
returns all their losses.
"""
UPDATING = ("step", "last", WHOLE_UPDATE)
"""Kinds of graphs that end with an update."""


def batch_kind(number: int, accumulate: int) -> str:
    """Return the kind of graph for the batch with this number, in a job that accumulates that many gradients."""
    if accumulate == 1:
        return "step"
    place = number % accumulate
    return "first" if place == 0 else "last" if place == accumulate - 1 else "next"


def graph_name(kind: str, rows: int, size: "BucketSize", bucket: int = 0) -> str:
    """Return the name of the graph for batches of that many rows of a bucket; `kind`: "step", "first",
    "next", "last" or "eval".
    """
    of_bucket = f"{kind}#{bucket}" if bucket else kind
    return of_bucket if rows == size.batch_size else f"{of_bucket}@{rows}"


_BUCKET_DIGITS = 4


def kind_of_graph(graph: str) -> str:
    """Return "step", "first", "next", "last", "eval" or WHOLE_UPDATE from a graph's name."""
    return graph.partition("@")[0].partition("#")[0]


def first_shapes(graphs: Iterable[str]) -> dict[str, str]:
    """Return the first graph of each kind, with its kind: the one for full batches of the first bucket if it exists."""
    found: dict[str, str] = {}
    for name in graphs:
        found.setdefault(kind_of_graph(name), name)
    return {name: kind for kind, name in found.items()}


def bucket_of(graph: str) -> int:
    """Return the bucket whose batches a graph processes, from its name."""
    _, _, number = graph.partition("@")[0].partition("#")
    return int(number) if number.isdecimal() and len(number) <= _BUCKET_DIGITS else 0


def data_part(graph: str) -> str:
    """Return the name prefix of the columns from which a graph takes its batches."""
    return "eval" if graph.startswith("eval") else train_part(bucket_of(graph))


def train_part(bucket: int) -> str:
    """Return the name prefix of a bucket's columns."""
    return f"train#{bucket}" if bucket else "train"


@dataclass(frozen=True, slots=True)
class BucketSize:
    """The number of samples of one shape, and the batch size."""

    samples: Count
    batch_size: Positive

    def batches(self, *, drop_last: bool) -> int:
        """Return the number of batches in one pass over them."""
        full, rest = divmod(self.samples, self.batch_size)
        return full + (1 if rest and not drop_last else 0)


@dataclass(frozen=True)
class Manifest:
    """A bundle's description of itself: everything the supervisor needs, without torch.

    `graphs`: names such as "step", "step@1" (the last, short batch), "step#1" (of another bucket), "eval". `fills`:
    storages that are initially constant. `layouts`: persistent storages by key. `result`: names of the trained tensors,
    as in `model.state_dict()`, tied ones once; those that no graph uses are stored as `unused/NAME`. `schedule`:
    hyperparameters that change, by update. `allow_nonfinite`: training continues with NaN or infinities.
    """

    name: str
    torch: str
    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)]
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
    reference: ExpectedResults = field(default_factory=ExpectedResults)
    recordings: Recordings = field(default_factory=Recordings)
    limits: PlannedLimits = NO_LIMITS
    device_kind: str = CPU
    """Kind of the device that computes the steps."""
    pruning: Pruning | None = None
    reordered: tuple[str, ...] = ()
    """Operators that add in a different order each time on that device, which was permitted; nothing
    is then equal to the bit.
    """
    files: Mapping[str, FileRange] = field(default_factory=dict)
    """Positions of frozen weights in the files from which they were loaded, by storage key."""
    in_pieces: bool = False
    """Whether a graph runs chains of operators in tiles, which the graph marks."""
    buckets: tuple[BucketSize, ...] = ()
    """Further samples whose rows have other shapes, in addition to `samples` in batches of `batch_size`."""
    blocks: Mapping[str, WeightBlocks] = field(default_factory=dict)
    """Tensors that the graphs use in blocks, by the key of the whole storage, whose layout is in `layouts`."""
    placed: tuple[str, ...] = ()
    """Kinds of devices among which operators are divided, on request; results are those of each
    device, not of one alone.
    """
    teams: Annotated[tuple[CpuTeam, ...], msgspec.Meta(max_length=MAX_TEAMS)] = ()
    """Thread teams, numbered from 1, among which the CPU's operators are divided besides team 0, all `threads`."""
    summed_in_pieces: bool = False
    """Whether a chain sums over its tiles in a different order than the whole, with permission; the graph marks it."""
    plain: PlainRun = field(default_factory=PlainRun)
    known: KnownSteps | None = None
    """The steps of a program that counts or keeps tensors across steps; None: every step is the same."""
    proximal: ProximalTerm | None = None
    plateau: PlateauRule | None = None
    """Rule by which learning rates follow the mean loss of each epoch; None: they do not follow it."""

    @property
    def format(self) -> int:
        """The oldest format that can represent this bundle."""
        if self.plateau is not None:
            return PLATEAU_FORMAT
        if self.proximal is not None:
            return PROXIMAL_FORMAT
        if self.known is not None:
            return NUMBERS_FORMAT
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
            return TILES_FORMAT
        if self.files:
            return FILES_FORMAT
        if self.pruning is not None:
            return PRUNING_FORMAT
        older = self.device_kind == CPU and WHOLE_UPDATE not in self.graphs
        return FORMAT if older else DEVICE_FORMAT

    @property
    def state(self) -> tuple[str, ...]:
        """The keys of the state's tensors, sorted by name; tensors in blocks appear under the key of the whole."""
        parts = {key for blocks in self.blocks.values() for key in (*blocks.rows, *blocks.columns)}
        return tuple(sorted(self.layouts.keys() - parts))

    @property
    def main_graph(self) -> str:
        """The graph that runs most of the training; its figures are those of a plan."""
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

    @property
    def known_updates(self) -> int | None:
        """Number of updates, from the first on, for which the optimizer's numbers and the program's
        steps are known; None: all.
        """
        recorded = self.optimizer.get("recorded")
        known = [None if recorded is None else recorded["updates"], len(self.schedule) or None]
        known.append(None if self.known is None else self.known.updates)
        return min((count for count in known if count is not None), default=None)

    def require_known(self, updates: int) -> None:
        """Raise BundleError unless the optimizer's numbers are known for that many updates."""
        known = self.known_updates
        if known is None or updates <= known:
            return
        epochs = -(-updates * self.accumulate // max(self.steps_per_epoch(), 1))
        raise BundleError(
            f"{self.name} has learning rates and other changing values for {known:,} updates, but this training "
            f"takes it to {updates:,}: plan the job again with --epochs {epochs}, or train no further than "
            f"{known * self.accumulate:,} steps"
        )


def manifest_of(raw: Mapping[str, Any], path: Path) -> Manifest:
    """Return the manifest in a file's JSON. Raises BundleError, with the `path`, if a field is missing or wrong."""
    try:
        manifest = msgspec.convert(raw, Manifest)
        _check_optimizer(manifest.optimizer)
        known = manifest.known
        if known is not None and known.numbers and len(known.numbers) < known.updates * manifest.accumulate:
            raise ValueError(f"{len(known.numbers)} batches have numbers, of {known.updates} updates")
        if manifest.plateau is not None and len(manifest.plateau.min_lrs) != len(manifest.optimizer["groups"]):
            raise ValueError(f"{len(manifest.plateau.min_lrs)} parameter groups have a least learning rate")
        for layout in (*manifest.batch, *manifest.layouts.values()):
            if layout.dtype not in ITEM_BYTES:
                raise ValueError(f"dtype {layout.dtype!r}")
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise BundleError(f"{path}: the manifest is incomplete or wrong ({error}); recreate the bundle") from error
    return manifest


def _number(hyperparameter: Any) -> Any:
    """Return a hyperparameter, or the number in one that is a tensor."""
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
    """Raise ValueError unless these are valid optimizer numbers, as `port_planner.ir.lowering.optimizer_scalars` reads
    them.
    """
    for scalar in data["numbers"]:
        each = scalar if isinstance(scalar, list) else [scalar]
        if not each or not all(isinstance(number, float) for number in each):
            raise ValueError(f"a number of the optimizer is {str(scalar)[:60]}")
    if not (data["updates"] is None or (isinstance(data["updates"], int) and data["updates"] > 0)):
        raise ValueError(f"the optimizer has numbers of {str(data['updates'])[:60]} updates")
