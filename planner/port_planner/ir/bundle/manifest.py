"""What a bundle says of itself: its plans and limits, how tensors lie, what was compared, and what its graphs are called.

Everything that the supervisor needs, without torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from port_planner.base.bounds import MAX_WHOLE, Count
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.arithmetic import Arithmetic
from port_planner.ir.bundle.pruning import Pruning
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.cpu_teams import MAX_TEAMS, CpuTeam
from port_planner.ir.graph import ITEM_BYTES
from port_planner.ir.operators import OPTIMIZERS

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
TILES_FORMAT = 7
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
FORMATS = (
    FORMAT, DEVICE_FORMAT, PACKING_FORMAT, PRUNING_FORMAT, FILES_FORMAT, TILES_FORMAT, BUCKETS_FORMAT, BLOCKS_FORMAT,
    PLACED_FORMAT, TEAMS_FORMAT, SUMMED_FORMAT,
)  # fmt: skip
MAX_THREADS = 1024
"""More than any processor has that trains here."""
Positive = Annotated[int, msgspec.Meta(ge=1, lt=MAX_WHOLE)]


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
class ExpectedResults:
    """What plain PyTorch made of the first steps, where the bundle was made.

    `losses`: as hexadecimal floats. `processor`: machine and vector instructions. `checksums`: XXH3-64 of the bytes of
    parameters, buffers and optimizer state after those steps, by storage key. `placed`: what the recorded operators made of them one by
    one, each on the device that it was placed on, which no plain PyTorch does. `arithmetic`: torch's settings before the first of them;
    None in a bundle that does not say.
    """

    losses: tuple[str, ...] = ()
    threads: int = 0
    processor: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    placed: bool = False
    arithmetic: Arithmetic | None = None


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What the script made of its first updates, run alone: in a process with no recorder, no mode and no patched function.

    `rows`: of each bucket it took so many of the first samples alone, so that epochs end. `generators`: XXH3-64 of the states of torch's
    default generators after it, by kind of device. `unchecked`: why there was no such run; "" where there was. `unchanged`: of so many
    further updates the operators, run without contents, were seen to be the same.
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
    teams: Annotated[tuple[CpuTeam, ...], msgspec.Meta(max_length=MAX_TEAMS)] = ()
    """Teams of threads, from number 1, that operators of the CPU are divided among beside number 0, all `threads`."""
    summed_in_pieces: bool = False
    """Whether chains of a graph sum over their pieces in another order than the whole, as was allowed; the graph says which."""
    plain: PlainRun = field(default_factory=PlainRun)

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
            return TILES_FORMAT
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

    @property
    def known_updates(self) -> int | None:
        """For how many updates the optimizer's numbers are known, from the first on; None: for all."""
        recorded = self.optimizer.get("recorded")
        known = [None if recorded is None else recorded["updates"], len(self.schedule) or None]
        return min((count for count in known if count is not None), default=None)

    def require_known(self, updates: int) -> None:
        """Raise BundleError unless the optimizer's numbers are known for so many updates."""
        known = self.known_updates
        if known is None or updates <= known:
            return
        epochs = -(-updates * self.accumulate // max(self.steps_per_epoch(), 1))
        raise BundleError(
            f"{self.name} has the learning rates, and what else changes from update to update, of {known:,} updates, and this training takes it "
            f"to {updates:,}: plan the job again with --epochs {epochs}, or train no further than {known * self.accumulate:,} steps"
        )


def manifest_of(raw: Mapping[str, Any], path: Path) -> Manifest:
    """Return the manifest that a file's JSON says. Raises BundleError, which names the `path`, where a field is missing or wrong."""
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
    """Raise ValueError where these are no numbers of an optimizer, as `port_planner.ir.lowering.optimizer_scalars` reads them."""
    for scalar in data["numbers"]:
        each = scalar if isinstance(scalar, list) else [scalar]
        if not each or not all(isinstance(number, float) for number in each):
            raise ValueError(f"a number of the optimizer is {str(scalar)[:60]}")
    if not (data["updates"] is None or (isinstance(data["updates"], int) and data["updates"] > 0)):
        raise ValueError(f"the optimizer has numbers of {str(data['updates'])[:60]} updates")
