"""Initial weights of a run instead of its bundle's: another run's result, or a federation's average."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import Manifest
from port_planner.ir.bundle.safetensors_io import Member, index, read_header
from port_planner.ir.graph import ITEM_BYTES, Role, Value, storage_key
from port_planner.ir.run_op import view
from port_planner.ir.torch_operators import dtype


class GivenWeightsError(PortError):
    """The weights do not belong to the bundle."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class _Block:
    """The rows of a frozen weight that a storage holds, and the bytes of each row; `whole`: the weight's key."""

    whole: str
    rows: slice
    bytes: slice


def _blocks(manifest: Manifest) -> Iterator[tuple[str, _Block]]:
    for key, blocks in manifest.blocks.items():
        item, everything = ITEM_BYTES[manifest.layouts[key].dtype], slice(None)
        for begin, end, part in _ranges(manifest, blocks.rows, 0):
            yield part, _Block(key, slice(begin, end), everything)
        for begin, end, part in _ranges(manifest, blocks.columns, 1):
            yield part, _Block(key, everything, slice(begin * item, end * item))


def _ranges(manifest: Manifest, keys: Iterable[str], dimension: int) -> Iterator[tuple[int, int, str]]:
    begin = 0
    for key in keys:
        end = begin + manifest.layouts[key].shape[dimension]
        yield begin, end, key
        begin = end


class GivenWeights:
    """The tensors of a file, by the storage that each fills.

    Raises GivenWeightsError, OSError. `path`: None if there is no file.
    """

    def __init__(self, bundle: Bundle, path: Path | None) -> None:
        self._bundle, self._path = bundle, path
        self._members: dict[str, Member] = {}
        self._blocks = dict(_blocks(bundle.manifest))
        if path is None:
            return
        prefix = storage_key(Role.STATE, "")
        copied = sorted(key.removeprefix(prefix) for key in bundle.tensors if key.startswith(prefix))
        if copied:
            raise GivenWeightsError(
                f"the optimizer keeps {copied[0]} as a copy of the weights that the bundle was made with, but {path} "
                "holds others; plan the job again with them"
            )
        with path.open("rb") as stream:
            available = path.stat().st_size
            try:
                found = index(read_header(stream, available), available, 0)
            except (ValueError, KeyError, RecursionError) as error:
                raise GivenWeightsError(f"{path} holds no weights ({error}); give a safetensors file") from error
        for name, member in found.items():
            layout = bundle.manifest.layouts.get(bundle.result_key(name))
            if name not in bundle.manifest.result or layout is None:
                raise GivenWeightsError(
                    f"{path} has {name[:60]!r}, which this bundle does not train; choose its own result"
                )
            if (member.dtype, member.shape) != (layout.dtype, tuple(layout.shape)):
                wanted = f"{layout.dtype}{list(layout.shape)}"
                raise GivenWeightsError(
                    f"{path}: {name} is {member.dtype}{list(member.shape)}, but the bundle needs {wanted}"
                )
            self._members[bundle.result_key(name)] = member
        starts = {} if bundle.manifest.proximal is None else bundle.manifest.proximal.starts
        self._members |= {key: found[name] for key, name in starts.items() if name in found}

    def contents(self, key: str, initial: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the initial bytes of a storage; `initial` are the bundle's, in chunks."""
        block = self._blocks.get(key)
        member = self._members.get(key if block is None else block.whole)
        if member is None or self._path is None:
            yield from initial
            return
        if block is not None:
            rows, width = member.shape[0], member.nbytes // member.shape[0]
            matrix = np.memmap(self._path, np.uint8, "r", member.offset, (rows, width))
            part = np.array(matrix[block.rows, block.bytes], order="C")
            yield from torch.from_numpy(part).flatten().split([chunk.numel() for chunk in initial])
            return
        layout, chunks = self._bundle.manifest.layouts[key], list(initial)
        storage = torch.cat(chunks)
        with self._path.open("rb") as stream:
            stream.seek(member.offset)
            flat = torch.frombuffer(bytearray(stream.read(member.nbytes)), dtype=dtype(layout.dtype))
        view(storage, Value(0, layout.dtype, layout.shape, layout.stride, layout.offset)).copy_(flat.view(layout.shape))
        yield from storage.split([chunk.numel() for chunk in chunks])
