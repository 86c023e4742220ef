"""Weights, buffers and optimizer state of a running job.

Which are in RAM, which on flash, and what is not yet safe.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from agent.backend.raw_bytes import block, placed, view
from agent.train.checkpoint import Commit, StateStore
from agent.train.pager import CHUNK
from planner.ir.bundle.bundle import Bundle, TensorLayout
from planner.ir.bundle.safetensors_io import Chunks, tensor_bytes
from planner.ir.graph import Value
from planner.ir.program import Program
from planner.ir.torch_operators import dtype


class Persistents:
    """Keeps RAM and flash in step. `resident` maps keys to tensors that executors use in place."""

    def __init__(self, store: StateStore, layouts: Mapping[str, TensorLayout]) -> None:
        self.store, self.layouts = store, layouts
        self.resident: dict[str, torch.Tensor] = {}
        self._dirty: set[str] = set()
        """Keys whose contents in RAM are newer than on flash."""

    def prepare(self, program: Program) -> None:
        """Bring to flash and into RAM what the program expects there when it starts."""
        graph = program.graph
        self.store.settle({graph.storages[s].key for s in program.carried})
        away = {graph.storages[s].key for s in program.starts_on_flash}
        devices = {s.key: s.device for s in graph.storages}
        here = {s.key for i, s in enumerate(graph.storages) if s.persistent and graph.uses[i]} - away
        leaving = [k for k in self.resident if k in away]
        for transfer in [self.store.write(k, self.resident[k]) for k in leaving if k in self._dirty]:
            self.store.pager.wait(transfer)
        for key in leaving:
            self._dirty.discard(key)
            del self.resident[key]
        for key in sorted(here - self.resident.keys()):
            self.resident[key] = placed(self.store.load(key), devices[key], self.store.sizes[key])

    def stepped(self, program: Program) -> None:
        """Note that a program has run: what it changed in RAM is not on flash yet."""
        for op in program.graph.ops:
            for s in op.writes:
                key = program.graph.storages[s].key
                if key in self.resident and program.graph.storages[s].persistent:
                    self._dirty.add(key)

    def commit(self, step: int, progress: Mapping[str, Any]) -> Commit:
        """Make everything durable as the state after `step` steps."""
        for key in self._to_write():
            self.store.write(key, self.resident[key])
        commit = self.store.commit(step, progress)
        self._dirty.clear()
        return commit

    def commit_and_free(self, step: int, progress: Mapping[str, Any]) -> Commit:
        """As `commit`, for the last time: a storage's memory is free as soon as it is written."""
        to_write = self._to_write()
        for key in self.resident.keys() - set(to_write):
            del self.resident[key]
        for key in to_write:
            self.store.write(key, self.resident.pop(key))
        return self.store.commit(step, progress)

    def _to_write(self) -> list[str]:
        """Return what is in RAM and newer there; the others left for flash in a step that never ended."""
        return sorted(self._dirty & self.resident.keys())

    @property
    def unwritten_bytes(self) -> int:
        """What a commit would have to write, transfers under way included."""
        keys = (self._dirty & self.resident.keys()) | self.store.under_way.keys()
        return sum(self.store.sizes[key] for key in keys)

    def forget(self) -> None:
        """Drop what is in RAM, as after a step that failed; the last commit is the truth."""
        self.resident.clear()
        self._dirty.clear()

    def tensor(self, key: str) -> torch.Tensor:
        """Return the present value of one storage's tensor."""
        layout = self.layouts[key]
        base = self.resident[key] if key in self.resident else self.store.load(key)
        return view(base, Value(0, layout.dtype, layout.shape, layout.stride, layout.offset))

    def pieces(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of a storage's tensor in row-major order; from flash chunk by chunk, never whole."""
        layout = self.layouts[key]
        nbytes = tensor_bytes(layout.dtype, layout.shape)
        if key in self.resident or not _row_major(layout) or layout.offset or not nbytes:
            flat = self.tensor(key).contiguous().view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), CHUNK):
                yield flat[start : start + CHUNK].cpu().numpy().data
            return
        slot, buffer = self.store.slot(key), block(CHUNK)
        for start in range(0, nbytes, CHUNK):
            size = min(CHUNK, slot.nbytes - start)
            self.store.pager.wait(self.store.pager.read(slot, buffer.data_ptr(), buffer, start, size))
            yield buffer[: min(size, nbytes - start)].numpy().data

    def chunks(self, keys: Iterable[str]) -> dict[str, Chunks]:
        """Return the tensors of these storages for writing, under the model's own names."""
        return {
            key.partition("/")[2]: Chunks(
                self.layouts[key].dtype, self.layouts[key].shape, functools.partial(self.pieces, key)
            )
            for key in keys
        }


def _row_major(layout: TensorLayout) -> bool:
    stride = 1
    for n, k in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if n != 1 and k != stride:
            return False
        stride *= n
    return True


def bundle_chunks(bundle: Bundle, key: str) -> Chunks:
    """Return a tensor of a bundle for writing it elsewhere."""
    member = bundle.tensors[key]
    return Chunks(member.dtype, member.shape, lambda: bundle.contents(key, CHUNK))


def initial_contents(bundle: Bundle, key: str, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes that a storage starts from, in chunks.

    Raises BundleError where they are not as written.
    """
    fill = bundle.manifest.fills.get(key)
    if fill is None:
        for piece in bundle.contents(key, CHUNK):
            yield torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        return
    kind = dtype(bundle.manifest.layouts[key].dtype)
    for start in range(0, nbytes, CHUNK):
        yield torch.full((min(CHUNK, nbytes - start) // kind.itemsize,), fill, dtype=kind).view(torch.uint8)
