"""Frozen weights whose values need fewer bits. They are stored as codes and scales or in 16 bits, and the step's own
operators decode them, if plans then cost less.

The job itself quantized them, or loaded them from 16 bits to compute in 32. This module only detects that, and verifies
that decoding gives their bits.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from port_agent import packing
from port_agent.packing.quantized import NF4_LEVELS, Quantization, encode_quantized
from port_agent.prepare.tiling.tiled_job import TiledJob, cost_of_plan
from port_planner import make_bundle
from port_planner.base.tensor_bytes import chunks_of_tensor, same_bits
from port_planner.ir.bundle.manifest import TensorLayout
from port_planner.ir.costs import DeviceCosts
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Role, storage_key
from port_planner.ir.operands.verify import verify_operands
from port_planner.make_bundle import CapturedJob
from port_planner.problem.decoded_weights import PAIRS, CodedWeight, ShortWeight, StoredWeight, with_decoded
from port_planner.profiling.operator_profile import MeasuredCosts

MIN_BYTES = 64 << 10
"""Bytes below which weights stay as they are, because one more operator takes longer than reading them."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_SHORT = (torch.bfloat16, torch.float16)


def with_quantized_weights(
    captured: CapturedJob,
    measured: MeasuredCosts,
    device: DeviceCosts,
    ram_bytes: int,
    planner: make_bundle.PlanFunction,
    measure: Callable[[CapturedJob], MeasuredCosts],
) -> tuple[CapturedJob, MeasuredCosts]:
    """Return the job with frozen weights that need fewer bits decoded in the step, and its costs, if `planner`'s plans
    then cost less or fit only then.

    `measure`: measures the rewritten graphs.
    """
    if not _candidates(captured):
        return captured, measured
    whole = cost_of_plan(TiledJob(captured, measured, ()), device, ram_bytes, planner)
    if whole is not None and whole.keeps_everything:
        return captured, measured
    coded = quantized(captured)
    if coded is captured:
        return captured, measured
    costs = measure(coded)
    found = cost_of_plan(TiledJob(coded, costs, ()), device, ram_bytes, planner)
    better = found is not None and (whole is None or found.joules < whole.joules)
    return (coded, costs) if better else (captured, measured)


def quantized(captured: CapturedJob) -> CapturedJob:
    """Return the job with every frozen weight that needs fewer bits decoded in the step; unchanged if there is none."""
    graphs, weights, tensors = captured.graphs, dict[str, StoredWeight](), dict(captured.tensors)
    layouts, unused = dict(captured.layouts), dict(captured.unused)
    for key, (name, tensor) in _candidates(captured).items():
        coded = _coded(name, tensor) or _in_16_bits(name, tensor)
        if coded is None:
            continue
        weights[key], stored = coded
        layout = layouts.pop(key)
        unused[name] = tensors.pop(key).as_strided(layout.shape, layout.stride, layout.offset)  # type: ignore[union-attr]
        for part, contents in stored.items():
            tensors[part] = contents
            layouts[part] = TensorLayout(_name_of(contents.dtype), tuple(contents.shape), tuple(contents.stride()))
    if not weights:
        return captured
    rewritten = {graph_name: with_decoded(graph, weights) for graph_name, graph in graphs.items()}
    for graph in rewritten.values():
        verify_operands(graph)
    return replace(captured, graphs=rewritten, tensors=tensors, layouts=layouts, unused=unused)


def _candidates(captured: CapturedJob) -> dict[str, tuple[str, torch.Tensor]]:
    """Return, by key, name and contents of the frozen weights that could be decoded in the
    step if they need fewer bits.
    """
    graphs = captured.graphs.values()
    if any(graph.device != CPU for graph in graphs):
        return {}
    written = {g.storages[s].key for g in graphs for op in g.ops for s in op.writes}
    named = ((key, key.removeprefix(storage_key(Role.PARAMETER, "")), t) for key, t in captured.tensors.items())
    return {
        key: (name, tensor)
        for key, name, tensor in named
        if name != key and key not in written and isinstance(tensor, torch.Tensor) and _may_be_coded(tensor)
    }


def _may_be_coded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its storage row by row with numbers of a type that can be quantized."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return whole and tensor.is_cpu and tensor.dtype in _DTYPES and tensor.nbytes >= MIN_BYTES


def _coded(name: str, tensor: torch.Tensor) -> tuple[CodedWeight, dict[str, torch.Tensor]] | None:
    """Return how a weight is coded, and its parts by key; None if it is not quantized, or if torch
    decodes it to different bits.
    """
    for quantization in Quantization if packing.available() else ():
        chunks: list[tuple[torch.Tensor, torch.Tensor]] = []
        for chunk in chunks_of_tensor(tensor):  # copies: the weight itself may be on flash, and stay there
            found = _coded_chunk(quantization, tensor.dtype, chunk)
            if found is None:
                break
            chunks.append(found)
        else:
            weight = CodedWeight(
                name, _DTYPES[tensor.dtype], tensor.numel(), quantization.block, quantization is Quantization.NF4
            )
            codes, scales = (torch.cat(parts) for parts in zip(*chunks, strict=True))
            stored = {weight.codes_name: codes, weight.scales_name: scales}
            if weight.paired:
                stored[PAIRS] = _pairs()
            return weight, {storage_key(Role.BUFFER, part): contents for part, contents in stored.items()}
    return None


def _in_16_bits(name: str, tensor: torch.Tensor) -> tuple[ShortWeight, dict[str, torch.Tensor]] | None:
    """Return a 32-bit weight whose numbers all exist in a 16-bit type, and the 16-bit numbers by key;
    None for any other weight.
    """
    for dtype in _SHORT if tensor.dtype is torch.float32 else ():
        chunks: list[torch.Tensor] = []
        for chunk in chunks_of_tensor(tensor):
            numbers = torch.frombuffer(chunk, dtype=torch.float32)
            chunks.append(numbers.to(dtype))
            if not same_bits(chunks[-1].to(torch.float32), numbers):
                break
        else:
            weight = ShortWeight(name, _name_of(dtype), tensor.numel())
            return weight, {storage_key(Role.BUFFER, weight.short_name): torch.cat(chunks)}
    return None


def _coded_chunk(
    quantization: Quantization, dtype: torch.dtype, chunk: memoryview
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return codes and scales of some of a weight's items, a row for each block, in the form of `CodedWeight`."""
    items = np.frombuffer(chunk, np.uint8)
    blocks, rest = divmod(items.size // dtype.itemsize, quantization.block)
    paired = quantization is Quantization.NF4
    codes = np.zeros((blocks, quantization.block * quantization.code_bits // 8), np.uint8 if paired else np.int8)
    scales = np.zeros((blocks, 1), np.float32)
    addresses = items.ctypes.data, blocks * quantization.block, dtype.itemsize, codes.ctypes.data, scales.ctypes.data
    if rest or not encode_quantized(quantization, *addresses):
        return None
    found = torch.from_numpy(codes).clone(), torch.from_numpy(scales).clone()
    levels = _pairs()[found[0].int()] if paired else found[0].float()
    decoded = (levels.view(-1, quantization.block) * found[1]).to(dtype)
    return found if decoded.view(torch.uint8).numpy().tobytes() == chunk.tobytes() else None


def _pairs() -> torch.Tensor:
    """Return the two levels of each byte of codes, the first in its low half."""
    levels = torch.tensor(NF4_LEVELS)
    byte = torch.arange(256)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], -1)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
