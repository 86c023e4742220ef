"""Weights, buffers and optimizer state of a running job: which are on the device, in the host's memory or on flash, and
which are not yet durable.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from port_agent.backend.host_copies import HostCopies
from port_agent.backend.raw_bytes import block, placed, whole_bytes
from port_agent.paging.pager import CHUNK
from port_agent.training.state.checkpoint import Commit, StateStore
from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import TensorLayout, WeightBlocks
from port_planner.ir.bundle.safetensors_io import Chunks, tensor_bytes
from port_planner.ir.graph import Value
from port_planner.ir.program import Program
from port_planner.ir.run_op import view
from port_planner.ir.torch_operators import dtype


class Persistents:
    """Keeps RAM and flash consistent. `resident` maps keys to tensors that executors use in place."""

    def __init__(
        self,
        store: StateStore,
        layouts: Mapping[str, TensorLayout],
        blocks: Mapping[str, WeightBlocks] = MappingProxyType({}),
    ) -> None:
        """`blocks`: tensors that no storage holds whole, by key, and the storages that hold their blocks."""
        self.store, self.layouts, self.blocks = store, layouts, blocks
        self.resident: dict[str, torch.Tensor] = {}
        self.dirty: set[str] = set()
        """Keys whose contents in RAM are newer than on flash."""

    def prepare(self, program: Program) -> None:
        """Move storages to flash, to the host's memory and to the device as the program expects them when it starts."""
        graph = program.graph
        self.store.wait({graph.storages[s].key for s in program.cross_step})
        away, at_host, copied = (
            {graph.storages[s].key for s in storages}
            for storages in (program.starts_on_flash, program.starts_on_host, program.host_copies)
        )
        devices = {s.key: s.device for s in graph.storages}
        used = {s.key for i, s in enumerate(graph.storages) if s.persistent and graph.uses[i]}
        leaving = [k for k in sorted(away) if self._in_ram(k) is not None]
        for transfer in [self.store.write(k, self._present(k)) for k in leaving if k in self.dirty]:
            self.store.pager.wait(transfer)
        for key in leaving:
            self.dirty.discard(key)
            self.resident.pop(key, None)
        for key in sorted(at_host):
            self._copy_to_host(key)
        for key in sorted(used - away - at_host - self.resident.keys()):
            self.resident[key] = placed(self._present(key), devices[key], self.store.sizes[key])
        if self._copies is not None:
            self._copies.drop((used & self._copies.known()) - copied)

    @property
    def _copies(self) -> HostCopies | None:
        staging = self.store.pager.staging
        return None if staging is None else staging.copies

    def _in_ram(self, key: str) -> torch.Tensor | None:
        """Return the current contents of a storage if they are on the device or in the host's memory; None if they are
        on flash.
        """
        if key in self.resident or self._copies is None:
            return self.resident.get(key)
        return self._copies.present(key)

    def _present(self, key: str) -> torch.Tensor:
        """Return the current contents of a storage, wherever they are stored."""
        found = self._in_ram(key)
        return self.store.load(key) if found is None else found

    def _copy_to_host(self, key: str) -> None:
        """Move the current contents of a storage from the device to the host's memory."""
        if self._copies is None:
            raise PortError(
                "this plan keeps weights of a device with its own memory in the host's, but runs on the CPU; "
                "plan the job again"
            )
        if key not in self._copies.current:
            nbytes = self.store.sizes[key]
            self._copies.copy_of(key, nbytes).copy_(whole_bytes(self._present(key))[:nbytes])
            self._copies.current.add(key)
        self.resident.pop(key, None)

    def stepped(self, program: Program) -> None:
        """Record that a program has run; its changes in RAM are not on flash yet."""
        for op in program.graph.ops:
            for s in op.writes:
                key = program.graph.storages[s].key
                if program.graph.storages[s].persistent and self._in_ram(key) is not None:
                    self.dirty.add(key)

    def commit(self, step: int, progress: Mapping[str, Any]) -> Commit:
        """Make everything durable as the state after `step` steps."""
        for key in self._to_write():
            self.store.write(key, self._present(key))
        commit = self.store.commit(step, progress)
        self.dirty.clear()
        return commit

    def commit_and_free(self, step: int, progress: Mapping[str, Any]) -> Commit:
        """Commit for the last time; a storage's memory is freed as soon as it is written."""
        to_write = self._to_write()
        for key in self.resident.keys() - set(to_write):
            del self.resident[key]
        for key in to_write:
            contents = self._present(key)
            self.resident.pop(key, None)
            self.store.write(key, contents)
        commit = self.store.commit(step, progress)
        if self._copies is not None:
            self._copies.drop(self._copies.known())
        return commit

    def _to_write(self) -> list[str]:
        """Return the keys that are newer in RAM; the others were evicted to flash in a step that did not end."""
        return sorted(key for key in self.dirty if self._in_ram(key) is not None)

    @property
    def unwritten_bytes(self) -> int:
        """The bytes that a commit would have to write, including transfers in progress."""
        keys = {*self._to_write(), *self.store.pending}
        return sum(self.store.sizes[key] for key in keys)

    def forget(self) -> None:
        """Discard the contents of RAM after a failed step; the last commit stays valid."""
        self.resident.clear()
        self.dirty.clear()
        if self._copies is not None:
            self._copies.current.clear()

    def tensor(self, key: str) -> torch.Tensor:
        """Return the current value of one storage's tensor."""
        layout = self.layouts[key]
        return view(self._present(key), Value(0, layout.dtype, layout.shape, layout.stride, layout.offset))

    def chunks_of(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of a storage's tensor in row-major order.

        From flash, they come chunk by chunk, never whole.
        """
        if key in self.blocks:
            for rows in self.blocks[key].rows:
                yield from self.chunks_of(rows)
            return
        layout = self.layouts[key]
        nbytes = tensor_bytes(layout.dtype, layout.shape)
        if self._in_ram(key) is not None or not _row_major(layout) or layout.offset or not nbytes:
            flat = self.tensor(key).contiguous().view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), CHUNK):
                yield flat[start : start + CHUNK].cpu().numpy().data
            return
        slot, buffer = self.store.slot(key), block(CHUNK)
        for start in range(0, nbytes, CHUNK):
            size = min(CHUNK, slot.nbytes - start)
            self.store.pager.wait(self.store.pager.read(slot, buffer.data_ptr(), buffer, start, size))
            yield buffer[: min(size, nbytes - start)].numpy().data

    def for_each_chunk(self, key: str, function: Callable[[torch.Tensor], None], *, changes: bool) -> None:
        """Call a function with the items of a storage, flattened and a part at a time. Its changes are
        kept if `changes` is true.

        Contents on flash are read, and written if changed, a part at a time.
        """
        kind = dtype(self.layouts[key].dtype)
        held = self._in_ram(key)
        if held is not None:
            for chunk in whole_bytes(held)[: self.store.sizes[key]].split(CHUNK):
                function(chunk.view(kind))
            if changes and key in self.resident and self._copies is not None:
                self._copies.current.discard(key)
            return
        pager, source, nbytes, buffer = self.store.pager, self.store.slot(key), self.store.sizes[key], block(CHUNK)
        target = self.store.working_slot(key) if changes else source
        for start in range(0, nbytes, CHUNK):
            chunk = buffer[: min(CHUNK, nbytes - start)]
            pager.wait(pager.receive(source, chunk, start, chunk.numel()))
            function(chunk.view(kind))
            if changes:
                pager.wait(pager.send(target, chunk, start))

    def chunks(self, keys: Iterable[str]) -> dict[str, Chunks]:
        """Return the tensors of these storages for writing, under the model's own names."""
        return {
            key.partition("/")[2]: Chunks(
                self.layouts[key].dtype, self.layouts[key].shape, functools.partial(self.chunks_of, key)
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
    """Return the chunks of a bundle's tensor for writing it elsewhere."""
    member = bundle.tensors[key]
    return Chunks(member.dtype, member.shape, lambda: bundle.contents(key, CHUNK))


def initial_contents(bundle: Bundle, key: str, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield the initial bytes of a storage, in chunks.

    Raises BundleError if they differ from what was written.
    """
    fill = bundle.manifest.fills.get(key)
    if fill is None:
        for chunk in bundle.contents(key, CHUNK):
            yield torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
        return
    kind = dtype(bundle.manifest.layouts[key].dtype)
    for start in range(0, nbytes, CHUNK):
        yield torch.full((min(CHUNK, nbytes - start) // kind.itemsize,), fill, dtype=kind).view(torch.uint8)
