"""The averaged part of a job: the floating-point tensors of its result that a training step changes,
or a fine-tuning's adapter.

Frozen weights (all except the adapters of a LoRA job) and counters are not sent. The module does not use torch:
half-precision numbers are averaged in 32 bits and rounded to nearest, ties to even, when they become weights again.
"""

import hashlib
import math
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from port_agent.federate.orders import TensorsOf
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.system.atomic_file import atomic_stream
from port_agent.system.helper_process import helper_exit_code, send_event
from port_agent.training.samples.columns import ArrivedColumns
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import TensorLayout, train_part
from port_planner.ir.bundle.safetensors_io import Chunks, Member, encode, index, read_header, tensor_bytes
from port_planner.ir.graph import Role, storage_key

Arrays = dict[str, NDArray[np.generic]]

_AVERAGED_AS = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""The type in which tensors of each type are sent and averaged."""
_BEYOND = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.ffp127")}
"""The least number, by type, that rounds to infinity."""
_COUNTERS = ("int", "uint", "bool")
"""Prefixes of the types of counters, which each device keeps for itself."""
_CHUNK_BYTES = 4 << 20


class FederatedTensorError(PortError):
    """The tensors are not those of the job."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class FederatedTensors:
    """The averaged tensors of a job, in the order in which they are sent."""

    layouts: Mapping[str, TensorLayout]
    """Layouts of tensors, by the model's own names."""
    samples: int
    """Number of samples for which the job was made; a job submitted with other data trains on those (`tensors_of`)."""
    initial: Callable[[], Arrays]
    """Returns the job's initial tensors; raises PortError if one is damaged."""
    data: str
    """A hash of the training samples."""
    base: str = ""
    """Hash of the frozen weights below, because the same adapter or trained layers over other
    weights are another model.
    """
    proximal_mu: float = 0.0
    """The factor of its proximal term; 0 if it has none."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of names, types and shapes, and of base and proximal term; devices with the
        same value can be averaged.
        """
        lines = [f"{name} {layout.dtype} {list(layout.shape)}" for name, layout in self.layouts.items()]
        lines += [self.base] if self.base else []
        lines += [f"proximal term {self.proximal_mu!r}"] if self.proximal_mu else []
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in transit."""
        return sum(tensor_bytes(_AVERAGED_AS[one.dtype], one.shape) for one in self.layouts.values())

    def check(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Raise FederatedTensorError unless these are exactly the tensors of this job, and all finite."""
        if list(arrays) != list(self.layouts):
            raise FederatedTensorError(f"it has {len(arrays)} tensors, not the {len(self.layouts)} of this job")
        for name, layout in self.layouts.items():
            array = arrays[name]
            if str(array.dtype) != _AVERAGED_AS[layout.dtype] or array.shape != layout.shape:
                found = f"{array.dtype} {list(array.shape)}"
                raise FederatedTensorError(f"{name} is {found}, not {_AVERAGED_AS[layout.dtype]} {list(layout.shape)}")
            if not np.isfinite(array).all():
                raise FederatedTensorError(f"{name} has numbers that are not finite")
            if float(np.abs(array).max(initial=0.0)) >= _BEYOND.get(layout.dtype, math.inf):
                raise FederatedTensorError(f"{name} has numbers that {layout.dtype} cannot hold")

    def named(self, arrays: list[NDArray[np.generic]]) -> Arrays:
        """Return named arrays from a list without names; raises FederatedTensorError as `check` does."""
        if len(arrays) != len(self.layouts):
            raise FederatedTensorError(f"{len(arrays)} tensors arrived, not the {len(self.layouts)} of this job")
        return dict(zip(self.layouts, arrays, strict=True))

    def read(self, path: Path) -> Arrays:
        """Return the averaged tensors in a file of weights; raises FederatedTensorError, OSError."""
        return _read(path, 0, self.layouts)

    def write(self, path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Write averaged tensors as weights of the job, atomically; raises OSError."""
        tensors = {name: _chunks(arrays[name], layout) for name, layout in self.layouts.items()}
        with atomic_stream(path, self.nbytes) as stream:
            for chunk in encode(tensors, {"format": "pt"}):
                stream.write(chunk)


def tensors_of(path: Path, scratch: Path, data: Path | None = None) -> TensorsOf:
    """Return the federated tensors of a job that trains on its bundle's samples, or on those of the directory `data`.

    The samples are temporarily copied to a directory in `scratch`. Raises PortError as `federated_tensors` does, and
    for data that does not fit the bundle; OSError.
    """
    tensors = federated_tensors(path)
    if data is None:
        return TensorsOf(tensors.fingerprint, tensors.nbytes, tensors.data, tensors.samples)
    bundle = Bundle(path)
    names = [train_part(bucket) for bucket in range(len(bundle.manifest.sizes))]
    parts = [[bundle.data[f"{name}/{i}"] for i in range(len(bundle.manifest.batch))] for name in names]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        columns = ArrivedColumns(data, parts, Path(folder))
        return TensorsOf(tensors.fingerprint, tensors.nbytes, columns.digest(), sum(columns.counts))


def federated_tensors(path: Path) -> FederatedTensors:
    """Return the averaged tensors of the job in a bundle or a fine-tuning's file.

    Raises FederatedTensorError if there are none.

    Raises PortError for a file that is neither, and OSError.
    """
    with path.open("rb") as stream:
        is_finetune = stream.read(1) == b"{"
    return _adapter_tensors(path) if is_finetune else _bundle_tensors(path)


def _bundle_tensors(path: Path) -> FederatedTensors:
    bundle = Bundle(path)
    layouts, changed = bundle.manifest.layouts, _changed_keys(bundle)
    keys = {name: bundle.result_key(name) for name in sorted(bundle.manifest.result)}
    averaged = {name: layouts[key] for name, key in keys.items() if key in changed}
    averaged = {name: layout for name, layout in averaged.items() if not layout.dtype.startswith(_COUNTERS)}
    for name, layout in averaged.items():
        if layout.dtype not in _AVERAGED_AS:
            raise FederatedTensorError(
                f"{path}: training changes {name} of type {layout.dtype}, which cannot be averaged"
            )
    if not averaged:
        raise FederatedTensorError(f"{path}: a training step changes no floating-point tensor of the result")

    def initial() -> Arrays:
        return {name: _initial(bundle, bundle.result_key(name), layout) for name, layout in averaged.items()}

    term = bundle.manifest.proximal
    return FederatedTensors(
        averaged,
        sum(size.samples for size in bundle.manifest.sizes),
        initial,
        bundle.data_digest(),
        base=_frozen(bundle, changed),
        proximal_mu=0.0 if term is None else term.mu,
    )


def _frozen(bundle: Bundle, changed: set[str]) -> str:
    """Return a text that distinguishes the parameters that no step changes from others; "" if there are none."""
    prefix = storage_key(Role.PARAMETER, "")
    keys = [key for key in bundle.manifest.state if key.startswith(prefix) and key not in changed]
    return " ".join(f"{key} {bundle.checksum(key)}" for key in keys)


def _initial(bundle: Bundle, key: str, layout: TensorLayout) -> NDArray[np.generic]:
    fill = bundle.manifest.fills.get(key)
    if fill is not None:
        return np.full(layout.shape, fill, _AVERAGED_AS[layout.dtype])
    flat = _widened(b"".join(bundle.contents(key, _CHUNK_BYTES)), layout.dtype)
    strides = [step * flat.itemsize for step in layout.stride]
    return np.lib.stride_tricks.as_strided(flat[layout.offset :], layout.shape, strides).copy()


def _adapter_tensors(path: Path) -> FederatedTensors:
    job = FinetuneJob.read(path)
    if job.sequences is None:
        raise FederatedTensorError(f"{path} has no initial adapter; submit it with `port-agent finetune --federated`")
    with path.open("rb") as stream:
        begin = len(stream.readline())
    members = _members(path, begin)
    layouts = {name: _dense(members[name]) for name in sorted(members) if members[name].dtype in _AVERAGED_AS}
    over = " ".join([str(job.options.base), *sorted(job.weights.values())])
    mu = job.options.proximal_mu or 0.0
    return FederatedTensors(layouts, job.sequences, lambda: _read(path, begin, layouts), job.data_sha256, over, mu)


def _dense(member: Member) -> TensorLayout:
    strides = [math.prod(member.shape[axis + 1 :]) for axis in range(len(member.shape))]
    return TensorLayout(member.dtype, member.shape, tuple(strides))


def _members(path: Path, begin: int) -> dict[str, Member]:
    """Return the offset of each tensor, for weights that begin at byte `begin` of a file.

    Raises FederatedTensorError, OSError.
    """
    available = path.stat().st_size - begin
    with path.open("rb") as stream:
        stream.seek(begin)
        try:
            return index(read_header(stream, available), available, begin)
        except (ValueError, KeyError, RecursionError, struct.error) as error:
            raise FederatedTensorError(f"{path} holds no weights: {error}") from error


def _read(path: Path, begin: int, layouts: Mapping[str, TensorLayout]) -> Arrays:
    """Return the numbers of the weights that begin at byte `begin` of a file; raises FederatedTensorError, OSError."""
    members, found = _members(path, begin), {}
    with path.open("rb") as stream:
        for name, layout in layouts.items():
            member = members.get(name)
            if member is None or (member.dtype, member.shape) != (layout.dtype, tuple(layout.shape)):
                raise FederatedTensorError(f"{path} has no {name} of type {layout.dtype}{list(layout.shape)}")
            stream.seek(member.offset)
            found[name] = _widened(stream.read(member.nbytes), layout.dtype).reshape(layout.shape)
    return found


def _changed_keys(bundle: Bundle) -> set[str]:
    training = [graph for name, graph in bundle.graphs.items() if not name.startswith("eval")]
    written = {graph.storages[storage].key for graph in training for op in graph.ops for storage in op.writes}
    whole = {key for key, blocks in bundle.manifest.blocks.items() if not written.isdisjoint(blocks.rows)}
    return written & bundle.manifest.layouts.keys() | whole


def _widened(data: bytes, dtype: str) -> NDArray[np.generic]:
    """Return the numbers of a tensor in the type in which they are averaged."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(_AVERAGED_AS[dtype])


def _narrowed(array: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """Return numbers in a tensor's own type, rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        return array.astype(dtype)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _chunks(array: NDArray[np.generic], layout: TensorLayout) -> Chunks:
    narrow = np.ascontiguousarray(_narrowed(array, layout.dtype))
    return Chunks(layout.dtype, tuple(layout.shape), lambda: [narrow.tobytes()])


def main(argv: Sequence[str]) -> int:
    """Print `tensors_of` a bundle and a directory of data as JSON for the supervisor, which has no
    numpy; return the exit code.
    """
    return helper_exit_code(lambda: send_event(tensors_of(*map(Path, argv))))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
