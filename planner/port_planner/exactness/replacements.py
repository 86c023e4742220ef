"""Run rewritten operators and their originals on synthetic data, and compare every byte.

Whether a tiled operator gives the bits of the whole one depends on the kernels of this machine, this version of torch
and the number of threads. So each form of rewriting is tested here once before a plan uses it; rewritings that differ
are not used. Sums that may be reordered may differ in the last digits.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from port_planner.base.errors import PortError
from port_planner.exactness.cancelling import cancel
from port_planner.exactness.stand_ins import SEED, as_bytes, made_up, stand_in
from port_planner.exactness.tiles import tiles_equal
from port_planner.exactness.vector_ends import in_whole_vectors, rounds_apart
from port_planner.ir.allowed_operators import only_checks
from port_planner.ir.graph import Op, Ref, StepGraph, Value, operands
from port_planner.ir.run_op import call, fill, fill_all, view
from port_planner.ir.torch_operators import dtype, function_of
from port_planner.operators import base_name, operator_of
from port_planner.operators.row import CutDimension, Product, Reads
from port_planner.profiling.operator_profile import give_back
from port_planner.tiling.rewriting import Replacement, RewrittenGraph, form_of
from port_planner.tiling.sums import CLOSE

_HALF = ("bfloat16", "float16")
"""Types whose numbers hide the order in which they were added."""


class LayoutError(PortError):
    """An operator gave a different layout than its graph declares."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A replacement that did not give the bits of the original, and where it differs.

    `place`: index, among the replaced operators, of the one whose result differs; None if that is not known.
    """

    replacement: Replacement
    where: str
    place: int | None = None

    @property
    def op(self) -> int | None:
        """The operator of the original whose result differs."""
        return None if self.place is None else self.replacement.old[self.place]


def differing(graph: StepGraph, rewritten: RewrittenGraph) -> tuple[Difference, ...]:
    """Return the replacements that do not give the original's bits here, with the current number of threads.

    Of equal replacements (same operators, shapes and layouts), only one runs.
    """
    groups: dict[Any, list[Replacement]] = defaultdict(list)
    for replacement in rewritten.replacements:
        groups[form_of(graph, rewritten, replacement)].append(replacement)
    found = []
    for alike in groups.values():
        first = _difference(graph, rewritten, alike[0])
        give_back()
        if first is not None:
            found += [replace(first, replacement=replacement) for replacement in alike]
    return tuple(found)


def compared_bytes(graph: StepGraph, rewritten: RewrittenGraph, replacement: Replacement) -> int:
    """Return the peak bytes of tensors that comparing a replacement holds; kernels may need more while they run."""
    compared = _ComparedValue(graph, rewritten, replacement)
    given = sum(graph.storages[s].nbytes for s in compared.given)
    before, expected = _run_bytes(graph, replacement.old, set(compared.given), compared.wanted, ())
    there = {compared.lies_at[s] for s in compared.given}
    actual, _ = _run_bytes(rewritten.graph, replacement.new, there, compared.wanted_there, rewritten.sources)
    cancelled = given + (_mirrored_bytes(graph, compared.given) if _only_product(graph, replacement) else 0)
    by_rows = [_by_rows_bytes(graph, i) for i in replacement.old if _row_tiles(graph, i, rewritten, replacement.new)]
    return max(given + max(before, expected + actual), cancelled, *by_rows)


def _by_rows_bytes(graph: StepGraph, i: int) -> int:
    """Return an upper bound of the bytes that `_is_alike_by_rows` holds."""
    taken = sum(graph.storages[s].nbytes for s in graph.reads[i])
    made = sum(graph.storages[s].nbytes for s in graph.creates[i])
    return taken + max(_mirrored_bytes(graph, graph.reads[i]), made + made)


def _mirrored_bytes(graph: StepGraph, storages: Iterable[int]) -> int:
    """Return the bytes that `cancel` needs in addition to the numbers in these storages."""
    return max(graph.storages[s].nbytes for s in storages) // 2


def _run_bytes(
    graph: StepGraph, ops: Sequence[int], given: Set[int], wanted: Set[int], parts: Container[int]
) -> tuple[int, int]:
    """Return the peak bytes of `_run` besides its inputs, and the bytes that it returns."""
    held = {s for i in ops for s in graph.ops[i].writes} & given
    last = {s: i for i in ops for s in (*graph.reads[i], *graph.creates[i])}
    now = most = sum(graph.storages[s].nbytes for s in held)
    for i in ops:
        fresh = {*graph.creates[i], *(s for s in graph.reads[i] if s in parts)} - held - given
        held |= fresh
        now += sum(graph.storages[s].nbytes for s in fresh)
        most = max(most, now)
        done = {s for s in held & {*graph.reads[i], *graph.creates[i]} if s not in wanted and last[s] == i}
        held -= done
        now -= sum(graph.storages[s].nbytes for s in done)
    return most, now


class _ComparedValue:
    """A replacement's inputs and compared results, in the graph and in the rewritten one."""

    def __init__(self, graph: StepGraph, rewritten: RewrittenGraph, replacement: Replacement) -> None:
        self.given = _inputs(graph, replacement.old)
        results = {s for i in replacement.old for s in (*graph.creates[i], *graph.ops[i].writes)}
        self.wanted = {
            s
            for s in results
            if s in graph.kept or graph.storages[s].persistent or not set(graph.uses[s]) <= set(replacement.old)
        }
        self.parts = [s for s, part in rewritten.sources.items() if part.storage in self.wanted]
        self.split = {rewritten.sources[s].storage for s in self.parts}
        self.lies_at = {s: rewritten.moved.get(s, s) for s in (*self.given, *self.wanted, *self.parts)}
        self.wanted_there = {self.lies_at[s] for s in (*(self.wanted - self.split), *self.parts)}


def _difference(graph: StepGraph, rewritten: RewrittenGraph, replacement: Replacement) -> Difference | None:
    """Return the storage in which the new ops' results differ, and how; None if they do not."""
    compared = _ComparedValue(graph, rewritten, replacement)
    edges = _edges(rewritten, replacement)
    contents = {s: made_up(graph, s, replacement.old, edges) for s in compared.given}
    found = _difference_of(graph, rewritten, replacement, compared, contents)
    if found is None and (product := _only_product(graph, replacement)) is not None:
        op = graph.ops[replacement.old[0]]
        fetch = partial(_tensor, graph, contents)
        cancel(product, {k: fill(op.args[k], fetch) for k in _numbers_of(op, product)})
        found = _difference_of(graph, rewritten, replacement, compared, contents)
    contents.clear()
    if found is not None:
        first = None if found.place is None else _adds_otherwise(graph, rewritten, replacement)
        return found if first is None else replace(found, place=first.place)  # results further on follow from it
    return (
        _apart_at_ends(graph, replacement.old, replacement)
        or _apart_at_ends(rewritten.graph, replacement.new, replacement)
        or _adds_otherwise(graph, rewritten, replacement)
    )


def _difference_of(
    graph: StepGraph,
    rewritten: RewrittenGraph,
    replacement: Replacement,
    compared: _ComparedValue,
    contents: dict[int, torch.Tensor],
) -> Difference | None:
    """Return the difference for these input contents."""
    wanted, split, lies_at = compared.wanted, compared.split, compared.lies_at
    expected = _run(graph, replacement.old, contents, wanted)
    given_there = {lies_at[s]: content for s, content in contents.items()}
    try:
        actual = _run(rewritten.graph, replacement.new, given_there, compared.wanted_there, rewritten.sources)
    except (RuntimeError, IndexError, LayoutError) as error:  # torch refuses a call with the first two
        return Difference(replacement, str(error).partition("\n")[0])
    for s in sorted(wanted - split | {*compared.parts}):
        if lies_at[s] not in actual:
            return Difference(replacement, f"{rewritten.graph.label(s)} is not made")
        source = rewritten.sources.get(s)
        place = _maker(graph, replacement, s if source is None else source.storage)
        bits = expected[s] if source is None else _part(source, expected)
        found = actual[lies_at[s]]
        if s in replacement.sums:
            apart = _apart(bits, found, _sum(graph, s, replacement))
            if not apart <= CLOSE:  # no number is not close
                where = f"{rewritten.graph.label(s)} differs by {apart:.1e} of its largest number"
                return Difference(replacement, where, place)
        elif not torch.equal(bits, found):
            count = int(torch.count_nonzero(bits != found))
            return Difference(
                replacement, f"{rewritten.graph.label(s)} differs in {count} of {bits.numel()} bytes", place
            )
    return None


def _maker(graph: StepGraph, replacement: Replacement, s: int) -> int:
    """Return the index, among the replaced operators, of the last one that creates or changes a storage."""
    makers = [k for k, i in enumerate(replacement.old) if s in (*graph.creates[i], *graph.ops[i].writes)]
    return makers[-1]


# -- in which order half precision adds


def _half_product(graph: StepGraph, op: Op) -> Product | None:
    """Return how an op multiplies and adds, if its numbers hide the order."""
    product = operator_of(op.name).product
    return product if product and any(graph.values[v].dtype in _HALF for v in operands(op)) else None


def _only_product(graph: StepGraph, replacement: Replacement) -> Product | None:
    """Return how the only replaced op multiplies, if its numbers hide the order in which it adds."""
    (i, *others) = replacement.old
    return None if others or replacement.sums else _half_product(graph, graph.ops[i])


def _numbers_of(op: Op, product: Product) -> list[int]:
    """Return the arguments that are factors or addends."""
    return [k for k in (*product.dims, product.addend) if k is not None and isinstance(op.args[k], Ref)]


def _adds_otherwise(graph: StepGraph, rewritten: RewrittenGraph, replacement: Replacement) -> Difference | None:
    """Return the product of the original that adds in a different order on a tile of its rows; None if there is none.

    Other operators can hide this: their addends mask it.
    """
    for place, i in enumerate(replacement.old):
        for start, rows in _row_tiles(graph, i, rewritten, replacement.new):
            if not _is_alike_by_rows(graph, graph.ops[i], start, rows):
                where = f"{graph.ops[i].name} adds in another order where {rows} rows are a tile"
                return Difference(replacement, where, place)
    return None


def _row_tiles(graph: StepGraph, i: int, rewritten: RewrittenGraph, new: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and size of tiles, one of each size, in which the new ops compute rows of
    a half-precision product.
    """
    op = graph.ops[i]
    product = _half_product(graph, op)
    if product is None:
        return []
    extents = _extents(graph, op, product)
    outermost = next(iter(extents))
    if outermost in {dim for dim, _, _ in product.sums}:
        return []
    found, start, whole = dict[int, int](), 0, extents[outermost]
    for k in new:
        tile = rewritten.graph.ops[k]
        sizes = _extents(rewritten.graph, tile, product) if base_name(tile.name) == base_name(op.name) else {}
        rows = sizes.get(outermost, whole)
        if rows < whole and {**sizes, outermost: whole} == extents:
            found.setdefault(rows, min(start % whole, whole - rows))
            start += rows
    return [(start, rows) for rows, start in found.items()]


def _extents(graph: StepGraph, op: Op, product: Product) -> dict[str, int]:
    """Return the sizes of a product's dimensions."""
    values = {k: graph.values[a.value] for k in product.dims if isinstance(a := op.args[k], Ref)}
    return {dim: n for k, value in values.items() for dim, n in zip(product.dims[k], value.shape, strict=False)}


def _is_alike_by_rows(graph: StepGraph, op: Op, start: int, rows: int) -> bool:
    """Return whether these rows of a product have the same bits when they are computed separately."""
    product = operator_of(op.name).product
    if product is None:
        raise ValueError(f"{op.name} is not a product")
    args, kwargs = fill_all(op, partial(_layout, graph))
    for k in _numbers_of(op, product):
        args[k] = stand_in(args[k], SEED + k)
    cancel(product, {k: args[k] for k in _numbers_of(op, product)})
    function = partial(function_of(op), **kwargs)
    whole = function(*args)
    outermost = next(iter(product.dims.values()))[0]
    for k in (k for k, dims in product.dims.items() if dims[0] == outermost):
        args[k] = args[k].narrow(0, start, rows)
    return tiles_equal(whole, [(start, start + rows, function(*args))])


# -- where vectors end


def _apart_at_ends(graph: StepGraph, ops: Sequence[int], replacement: Replacement) -> Difference | None:
    """Return the operator whose results differ at the ends of threads' shares, which synthetic numbers may
    miss; None if there is none.
    """
    threads = torch.get_num_threads()
    for op in (graph.ops[i] for i in ops):
        known = operator_of(op.name)
        elementwise = (
            known.cut is not None and known.cut.dimension is CutDimension.ELEMENTS and known.reads is not Reads.SHAPES
        )
        if threads == 1 or not elementwise:
            continue
        sizes = {math.prod(graph.values[v].shape) for v in operands(op)} - {1}
        if len(sizes) <= 1 and all(in_whole_vectors(size, threads) for size in sizes):
            continue
        if rounds_apart(function_of(op), *fill_all(op, partial(_layout, graph))):
            return Difference(replacement, f"{op.name} rounds apart where a thread's share ends within a vector")
    return None


def _apart(bits: torch.Tensor, found: torch.Tensor, value: Value) -> float:
    """Return the largest difference of two sums, as a share of the largest number in the first."""
    expected, actual = (content.view(dtype(value.dtype)) for content in (bits, found))
    largest = float(expected.abs().max())
    apart = float((expected - actual).abs().max())
    return apart / largest if largest else math.inf if apart else 0.0


def _sum(graph: StepGraph, s: int, replacement: Replacement) -> Value:
    """Return the sum in this storage."""
    made = (v for i in replacement.old for v in graph.ops[i].outputs if v is not None)
    return next(graph.values[v] for v in made if graph.values[v].storage == s)


def _edges(rewritten: RewrittenGraph, replacement: Replacement) -> list[int]:
    """Return the first and last row of every tensor part that the new ops use, where an off-by-one error would show."""
    taken = {s for i in replacement.new for s in rewritten.graph.reads[i]} & rewritten.sources.keys()
    parts = [rewritten.sources[s] for s in sorted(taken)]
    return sorted({row for p in parts for row in (p.offset // p.stride[0], p.offset // p.stride[0] + p.shape[0] - 1)})


def _inputs(graph: StepGraph, ops: Sequence[int]) -> list[int]:
    """Return the storages whose earlier contents `ops` read."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for i in ops:
        found.update(dict.fromkeys(s for s in graph.reads[i] if s not in made))
        made.update(graph.creates[i])
    return list(found)


def _run(
    graph: StepGraph,
    ops: Sequence[int],
    given: dict[int, torch.Tensor],
    wanted: set[int],
    sources: Mapping[int, Value] = MappingProxyType({}),
) -> dict[int, torch.Tensor]:
    """Run ops on copies of the given contents; return the bytes of the wanted storages.

    `sources`: for storages that initially contain a part of a given one, that part.
    """
    torch.manual_seed(SEED)
    changed = {s for i in ops for s in graph.ops[i].writes}
    held = {s: content.clone() if s in changed else content for s, content in given.items()}
    last = {s: i for i in ops for s in (*graph.reads[i], *graph.creates[i])}
    with torch.no_grad():
        for i in ops:
            for s in (s for s in graph.reads[i] if s in sources and s not in held):
                held[s] = _part(sources[s], given)
            _call(graph, i, held)
            for s in {*graph.reads[i], *graph.creates[i]} - wanted:
                if last[s] == i:
                    held.pop(s, None)
    return {s: held[s] for s in wanted if s in held}


def _call(graph: StepGraph, i: int, held: dict[int, torch.Tensor]) -> None:
    op = graph.ops[i]
    if only_checks(op.name):
        return
    for v, tensor in zip(op.outputs, call(op, partial(_tensor, graph, held)), strict=True):
        if v is not None and (s := graph.values[v].storage) in graph.creates[i]:
            _check_layout(op, graph.values[v], tensor)
            held[s] = as_bytes(tensor, graph.storages[s])


def _tensor(graph: StepGraph, held: Mapping[int, torch.Tensor], v: int) -> torch.Tensor:
    value = graph.values[v]
    return view(held[value.storage], value)


def _layout(graph: StepGraph, v: int) -> torch.Tensor:
    """Return a tensor with the layout of a value, without memory."""
    value = graph.values[v]
    return torch.empty_strided(value.shape, value.stride, dtype=dtype(value.dtype), device="meta")


def _part(value: Value, held: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy of a part of the given contents, as bytes in row-major order."""
    return view(held[value.storage], value).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _check_layout(op: Op, value: Value, tensor: torch.Tensor) -> None:
    found = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    if found != (value.shape, value.stride, value.offset):
        raise LayoutError(f"{op.name} gives {found}, the graph says {value.shape}, {value.stride}, {value.offset}")
