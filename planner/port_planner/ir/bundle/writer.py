"""Write a bundle: large contents once and first, plans after them.

So new plans do not require writing the weights again.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack

from port_planner.ir.bundle import safetensors_io
from port_planner.ir.bundle.bundle import SUMS, TENSOR_MEMBERS, manifest_hashes
from port_planner.ir.bundle.checksums import block_sums, tensor_hasher
from port_planner.ir.bundle.codec import pack_costs, pack_graph, pack_plan
from port_planner.ir.bundle.manifest import PACKING_FORMAT, BundleError, Manifest
from port_planner.ir.bundle.safetensors_io import Chunks, tensor_bytes
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.plan import Plan

_MANIFEST, _PLANS, _COSTS = "manifest.json", "plans.msgpack", "costs.msgpack"


@dataclass(frozen=True)
class Contents:
    """Contents of a bundle to be written. `plans[i][name]` is choice i's plan of graph `name`."""

    manifest: Manifest
    graphs: Mapping[str, StepGraph]
    costs: Mapping[str, CostTable]
    plans: Sequence[Mapping[str, Plan]]
    tensors: Mapping[str, Chunks]
    data: Mapping[str, Chunks]


def write_bundle(path: Path, contents: Contents) -> None:
    """Write a bundle atomically: `path` is the old file or the complete new one.

    Raises BundleError if it cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            hashes: dict[str, str] = {}
            data = {**contents.data, **{SUMS + key: _sums(column) for key, column in contents.data.items()}}
            for name, tensors in zip(TENSOR_MEMBERS, (contents.tensors, data), strict=True):
                hashes |= _write_tensors(archive, name, tensors)
            graphs = {name: pack_graph(g) for name, g in contents.graphs.items()}
            hashes["graphs.msgpack"] = _write_packed(archive, "graphs.msgpack", graphs)
            _write_plans(archive, contents.manifest, contents.plans, contents.costs, hashes)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _not_written(path, error) from error
    publish_bundle(temporary, path)


def replace_plans(
    path: Path, manifest: Manifest, plans: Sequence[Mapping[str, Plan]], costs: Mapping[str, CostTable]
) -> None:
    """Write other plans, costs and manifest to the end of a bundle, leaving its tensors and data unchanged.

    This is not atomic, so it is only for a bundle that is still being made. Raises BundleError if it cannot be written.
    """
    hashes = manifest_hashes(path)
    try:
        with zipfile.ZipFile(path, "a") as archive:
            last = [archive.getinfo(name) for name in (_PLANS, _COSTS, _MANIFEST)]
            if [i.filename for i in archive.infolist()[-len(last) :]] != [i.filename for i in last]:
                raise BundleError(f"{path}: its plans are not at the end; recreate the bundle")
            for info in last:
                archive.filelist.remove(info)
                del archive.NameToInfo[info.filename]
            archive.start_dir = last[0].header_offset  # new members start where the first of the old ones started
            _write_plans(archive, manifest, plans, costs, hashes)
    except OSError as error:
        raise _not_written(path, error) from error


def publish_bundle(finished: Path, path: Path) -> None:
    """Sync a finished bundle to disk and rename it to its final path.

    If that fails, deletes it and raises BundleError.
    """
    try:
        with open(finished, "rb") as stream:
            os.fsync(stream.fileno())
        finished.replace(path)
    except OSError as error:
        finished.unlink(missing_ok=True)
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> BundleError:
    return BundleError(f"{path} could not be written: {error.strerror}; free space or choose another -o")


def _write_plans(
    archive: zipfile.ZipFile,
    manifest: Manifest,
    plans: Sequence[Mapping[str, Plan]],
    costs: Mapping[str, CostTable],
    hashes: Mapping[str, str],
) -> None:
    """Write what may still change: plans, costs, and the manifest, which contains all hashes."""
    packed = [{name: pack_plan(p) for name, p in choice.items()} for choice in plans]
    all_hashes = {
        **hashes,
        _PLANS: _write_packed(archive, _PLANS, packed),
        _COSTS: _write_packed(archive, _COSTS, {name: pack_costs(c) for name, c in costs.items()}),
    }
    packing = any(table.packings or any(t.packs_pages for t in table.device.targets) for table in costs.values())
    data = {
        "format": max(PACKING_FORMAT, manifest.format) if packing else manifest.format,
        "hashes": all_hashes,
        **asdict(manifest),
    }
    archive.writestr(zipfile.ZipInfo(_MANIFEST), json.dumps(data), zipfile.ZIP_DEFLATED)


def _write_packed(archive: zipfile.ZipFile, name: str, content: Any) -> str:
    data = msgpack.packb(content)
    archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return hashlib.sha256(data).hexdigest()


def _write_tensors(archive: zipfile.ZipFile, name: str, tensors: Mapping[str, Chunks]) -> dict[str, str]:
    """Write a safetensors member in chunks.

    Returns the SHA-256 of its header and the checksum of each tensor.
    """
    header = safetensors_io.encoded_header(tensors)
    hashes = {name: hashlib.sha256(header).hexdigest()}
    with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as stream:
        stream.write(header)
        for key in sorted(tensors):
            hasher = tensor_hasher()
            for chunk in tensors[key].chunks():
                stream.write(chunk)
                hasher.update(chunk)
            hashes[f"{name}/{key}"] = hasher.hexdigest()
    return hashes


def _sums(column: Chunks) -> Chunks:
    """Return the checksums of a column of data, for writing."""
    rows = column.shape[0]
    sums = block_sums(tensor_bytes(column.dtype, column.shape) // max(1, rows), column.chunks())
    return Chunks("uint8", (len(sums),), lambda: [sums])
