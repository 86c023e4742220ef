"""A job on disk: one file that holds graphs, plans, costs, initial tensors and data. It can compute; it cannot run code.

A zip archive: `manifest.json` (with the SHA-256 of every other member), `graphs.msgpack`, `plans.msgpack`,
`costs.msgpack`, and `tensors.safetensors` and `data.safetensors`, both stored uncompressed so that single rows and
chunks can be read in place. Reading needs no torch and never unpacks to a path that the archive names.
"""

import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from planner.ir.bundle import safetensors_io
from planner.ir.bundle.codec import unpack_costs, unpack_graph, unpack_plan
from planner.ir.bundle.safetensors_io import Member
from planner.ir.errors import ExitCode, PortError
from planner.ir.graph import ITEM_BYTES, MAX_STORAGE_BYTES, Role, storage_key
from planner.ir.operators import OPTIMIZERS

FORMAT = 1
MAX_HEADER_BYTES = 64 << 20
"""The largest compressed member measured is 0.4 MB; a larger one is damaged or hostile."""
MAX_MANIFEST_BYTES = 32 << 20
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zlib.error)
"""What the standard library raises for an archive that is damaged, encrypted, or of a version it does not know."""
_PACKED = ("graphs.msgpack", "plans.msgpack", "costs.msgpack")
TENSOR_MEMBERS = ("tensors.safetensors", "data.safetensors")


class BundleError(PortError):
    """A file that is not a bundle, or one that is damaged or hostile."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor lies in its storage."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """One entry of the frontier: a plan per graph and what the agent needs to choose among them."""

    ram_bytes: int
    peak_bytes: int
    seconds: float
    joules: float
    overhead_joules: float
    bound_joules: float | None
    written_bytes: int
    strategy: str


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself. Everything the supervisor needs, without torch.

    `graphs`: names such as "step", "step@1" (the last, short batch), "eval". `fills`: storages whose initial contents
    are one value. `layouts`: persistent storages by key. `result`: names of the tensors that training results in, as
    `model.state_dict()` has them, tied ones once; those that no graph uses lie in the bundle as `unused/NAME`. `schedule`: hyperparameters that change, by update.
    `reference`: losses of the first steps as plain PyTorch computed them where the bundle was made.
    """

    name: str
    torch: str
    threads: int
    seed: int
    batch_size: int
    accumulate: int
    samples: int
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
    eval_samples: int = 0
    schedule: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    reference: Mapping[str, Any] = field(default_factory=dict)

    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data; the last may be short."""
        full, rest = divmod(self.samples, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)


# -- reading


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a bundle; cheap, and without torch."""
    with _open(path) as archive:
        return _manifest(_read_manifest_json(archive, path), path)


def manifest_hashes(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every member that the manifest names; raise BundleError where it has none."""
    with _open(path) as archive:
        return _hashes(_read_manifest_json(archive, path), path)


def _hashes(raw: Mapping[str, Any], path: Path) -> dict[str, str]:
    hashes = raw.get("hashes")
    if not isinstance(hashes, dict):
        raise BundleError(f"{path}: the manifest has no hashes; make the bundle again")
    return {str(k): str(v) for k, v in hashes.items()}


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
            self.id = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
            self.tensors, self.data = (_index(archive, name, path) for name in TENSOR_MEMBERS)
            self.hashes = hashes
        self._check(path)

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
        for name, graph in self.graphs.items():
            if len(self.costs[name].ops) != len(graph.ops):
                raise BundleError(
                    f"{path}: graph {name} has {len(graph.ops)} ops, its costs {len(self.costs[name].ops)}"
                )
            for storage in graph.storages:
                self._check_initial(path, storage.key, storage.nbytes, persistent=storage.persistent)

        for name in self.manifest.result:
            key = self.result_key(name)
            if key not in self.manifest.layouts and key not in self.tensors:
                raise BundleError(f"{path}: the result names a tensor {name[:60]!r} that the bundle does not have")

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

    def verify_tensors(self) -> None:
        """Read the whole file once and compare the hashes of the tensors.

        Raises BundleError on a difference.
        """
        with _open(self.path) as archive:
            for name in TENSOR_MEMBERS:
                if _digest(archive, name, self.path) != self.hashes.get(name):
                    raise BundleError(
                        f"{self.path}: {name} is damaged (SHA-256 differs); copy or make the bundle again"
                    )

    def read(self, fd: int, member: Member, start: int, nbytes: int) -> bytes:
        """Return `nbytes` of a tensor from byte `start`.

        `fd` is an open descriptor of the file.

        Raises BundleError where the file ends in the middle of it.
        """
        data = os.pread(fd, min(nbytes, member.nbytes - start), member.offset + start)
        if len(data) != min(nbytes, member.nbytes - start):
            raise BundleError(f"{self.path} ends in the middle of a tensor; copy or make the bundle again")
        return data


def _digest(archive: zipfile.ZipFile, name: str, path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with archive.open(name) as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
    except _ZIP_ERRORS as error:
        raise BundleError(f"{path}: {name} is damaged ({error}); copy or make the bundle again") from error
    return digest.hexdigest()


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
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise BundleError(f"{path} has format {found}, this version reads {FORMAT}; make the bundle again")
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


def _manifest(raw: dict[str, Any], path: Path) -> Manifest:
    try:
        fields = {name: raw[name] for name in Manifest.__dataclass_fields__}
        fields["batch"] = tuple(_layout(x) for x in fields["batch"])
        fields["layouts"] = {str(k): _layout(v) for k, v in fields["layouts"].items()}
        fields["plans"] = tuple(PlanChoice(**p) for p in fields["plans"])
        fields["graphs"] = tuple(map(str, fields["graphs"]))
        fields["result"] = tuple(map(str, fields["result"]))
        fields["schedule"] = tuple(tuple(groups) for groups in fields["schedule"])
        fields["fills"] = {str(k): float(v) for k, v in fields["fills"].items()}
        for name in ("threads", "seed", "batch_size", "accumulate", "samples", "eval_samples"):
            fields[name] = _whole(fields[name], name)
        _check_optimizer(fields["optimizer"])
        manifest = Manifest(**fields)
        if min(manifest.threads, manifest.batch_size, manifest.accumulate) < 1 or manifest.threads > 1024:
            raise ValueError("threads, batch_size and accumulate must be 1 or more")
        for choice in manifest.plans:
            _whole(choice.ram_bytes, "ram_bytes"), _whole(choice.peak_bytes, "peak_bytes")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{path}: the manifest is incomplete or wrong ({error}); make the bundle again") from error
    return manifest


def _check_optimizer(data: Mapping[str, Any]) -> None:
    if data["name"] not in OPTIMIZERS:
        raise ValueError(f"the optimizer is {str(data['name'])[:60]!r}")
    if not data["groups"] or not all(isinstance(g, dict) and isinstance(g["lr"], int | float) for g in data["groups"]):
        raise ValueError("the optimizer has no parameter groups")


def _whole(number: Any, name: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 62:
        raise ValueError(f"{name} is {number!r}")
    return number


def _layout(data: Mapping[str, Any]) -> TensorLayout:
    layout = TensorLayout(
        str(data["dtype"]), tuple(map(int, data["shape"])), tuple(map(int, data["stride"])), int(data["offset"])
    )
    if layout.dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {layout.dtype!r}")
    return layout


def _index(archive: zipfile.ZipFile, name: str, path: Path) -> dict[str, Member]:
    """Return where each tensor of a safetensors member lies in the file.

    Every number checked.
    """
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise BundleError(f"{path} has no {name}; it is not a bundle, or damaged") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_STORAGE_BYTES:
        raise BundleError(f"{path}: {name} is compressed or too large; make the bundle with port-agent plan")
    try:
        with archive.open(info) as stream:
            return safetensors_io.index(stream, info.file_size, _payload_offset(archive, info))
    except (*_ZIP_ERRORS, struct.error, TypeError, KeyError, AttributeError) as error:
        raise BundleError(f"{path}: {name} is damaged ({error}); copy or make the bundle again") from error


def _payload_offset(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: behind its local header (30 bytes, name, extra field)."""
    stream = archive.fp
    if stream is None:
        raise ValueError("the archive is closed")
    stream.seek(info.header_offset)
    header = stream.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + int(name_length) + int(extra_length)
