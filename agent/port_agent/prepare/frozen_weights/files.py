"""Frozen weights that stay in the safetensors files from which a job loaded them; its bundle names
file, place and checksum.

safetensors maps its files, so the address of a weight's memory shows which bytes of which file it is.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from port_agent.intercept.residency.storages import allocated_bytes, data_ptr, private_file_mappings, untyped_storage
from port_planner.base.code_pages import FileMapping
from port_planner.base.tensor_bytes import chunks_of_tensor, storage_chunks
from port_planner.capture.step import Fill
from port_planner.ir.bundle.bundle import contents_of_file
from port_planner.ir.bundle.checksums import tensor_hasher
from port_planner.ir.bundle.manifest import BundleError, FileRange
from port_planner.ir.device_kinds import CPU
from port_planner.make_bundle import CapturedJob, TensorSlice

MIN_BYTES = 64 << 10
"""Bytes below which tensors go into the bundle, because naming them would save almost nothing."""
_CHUNK_BYTES = 1 << 20


def with_weight_files(captured: CapturedJob) -> CapturedJob:
    """Return the job with those weights left in their files that no step writes and whose
    files contain the same bytes.
    """
    if sys.platform != "linux" or captured.job.pruning is not None:
        return captured
    written = {g.storages[s].key for g in captured.graphs.values() for op in g.ops for s in op.writes}
    mappings = list(private_file_mappings())
    files = {}
    for key, tensor in captured.tensors.items():
        if isinstance(tensor, Fill) or key in written:
            continue
        contents = _contents(tensor)
        if contents is not None:
            part = _part_of_file(key, contents, mappings)
            if part is not None:
                files[key] = part
    return replace(captured, files=files)


@dataclass(frozen=True, slots=True)
class _Contents:
    """Bytes in memory with which a storage begins."""

    address: int
    nbytes: int
    chunks: Iterable[memoryview]


def _contents(tensor: torch.Tensor | TensorSlice) -> _Contents | None:
    """Return where the contents of a storage are in the host's memory; None if they are not contiguous there."""
    part = tensor.tensor if isinstance(tensor, TensorSlice) else None
    whole = tensor if isinstance(tensor, torch.Tensor) else tensor.tensor
    if whole.device.type != CPU or (part is not None and not part.is_contiguous()):
        return None
    storage = untyped_storage(whole)
    if part is None:
        return _Contents(data_ptr(storage), allocated_bytes(storage), storage_chunks(whole))
    begin = data_ptr(storage) + int(part.storage_offset()) * part.itemsize
    return _Contents(begin, part.numel() * part.itemsize, chunks_of_tensor(part))


def _part_of_file(key: str, contents: _Contents, mappings: Iterable[FileMapping]) -> FileRange | None:
    """Return the part of a file that contains these contents; None if there is none, or its bytes differ."""
    address, nbytes = contents.address, contents.nbytes
    around = next((m for m in mappings if m.start <= address and address + nbytes <= m.stop), None)
    if around is None or nbytes < MIN_BYTES:
        return None
    hasher = tensor_hasher()
    for chunk in contents.chunks:
        hasher.update(chunk)
    part = FileRange(around.path, around.offset + address - around.start, nbytes, hasher.hexdigest())
    try:
        for _ in contents_of_file(key, part, _CHUNK_BYTES):
            pass
    except BundleError:  # no safetensors, replaced on disk since it was loaded, or changed in memory
        return None
    return part
