"""Runs what was rewritten beside the original, on made-up data, and compares every byte.

Whether an operator in pieces has the bits of the whole depends on the kernels of this machine, this version of torch and
the number of threads. So each rewriting is tried here, once for each form, before a plan is made with it; what differs
is not used. Of sums in another order, which somebody allowed, last digits may differ.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from planner.ir.bundle.codec import pack_graph, unpack_graph
from planner.ir.errors import PortError
from planner.ir.graph import ITEM_BYTES, Argument, Op, Ref, Scalar, StepGraph, Storage, Value, operands
from planner.ir.operators import CHECKS
from planner.ir.torch_operators import dtype, function_of, literal
from planner.profiling.kept_costs import operator_key
from planner.profiling.operators import give_back
from planner.slices.algebra import MADE_OF_NOTHING, RULES, Carry, base_name
from planner.slices.rewriting import Replacement, Rewritten
from planner.slices.sums import CLOSE
from planner.slices.thread_shares import in_whole_vectors, rounds_apart

_SEED = 20
_SPREAD = 0.5
"""Standard deviation of made-up numbers: exponentials of them neither overflow nor become all alike."""
_SCALAR = 0.5
"""What stands for a number that the optimizer gives each step."""

LABELS = {
    "aten::nll_loss_forward": (0, 1), "aten::nll_loss_backward": (1, 2), "aten::gather": (0, 2),
    "aten::embedding": (0, 1), "aten::index_select": (0, 2), "aten::embedding_dense_backward": (2, 1),
}  # fmt: skip
"""Operators with indices: the argument whose size bounds them, or the number that does, and the argument that holds them."""


class LayoutError(PortError):
    """An operator gave another layout than its graph says."""


@dataclass(frozen=True, slots=True)
class Differing:
    """A replacement that did not give the bits of the original, and where that showed."""

    replacement: Replacement
    where: str


def differing(graph: StepGraph, rewritten: Rewritten) -> tuple[Differing, ...]:
    """Return the replacements that do not give the original's bits here, with the present number of threads.

    Of those alike (same operators, shapes and layouts) one is run.
    """
    groups: dict[Any, list[Replacement]] = defaultdict(list)
    for replacement in rewritten.replacements:
        groups[_form_of_both(graph, rewritten, replacement)].append(replacement)
    found = []
    for alike in groups.values():
        where = _difference(graph, rewritten, alike[0])
        give_back()
        if where:
            found += [Differing(replacement, where) for replacement in alike]
    return tuple(found)


def most_held_bytes(graph: StepGraph, rewritten: Rewritten) -> int:
    """Return the most bytes of tensors that `differing` holds at once; kernels may take more while they run."""
    return max((_held_bytes(graph, rewritten, replacement) for replacement in rewritten.replacements), default=0)


def _held_bytes(graph: StepGraph, rewritten: Rewritten, replacement: Replacement) -> int:
    compared = _Compared(graph, rewritten, replacement)
    given = sum(graph.storages[s].nbytes for s in compared.given)
    before, expected = _run_bytes(graph, replacement.old, set(compared.given), compared.wanted, ())
    there = {compared.lies_at[s] for s in compared.given}
    actual, _ = _run_bytes(rewritten.graph, replacement.new, there, compared.wanted_there, rewritten.sources)
    return given + max(before, expected + actual)


def _run_bytes(
    graph: StepGraph, ops: Sequence[int], given: Set[int], wanted: Set[int], parts: Container[int]
) -> tuple[int, int]:
    """Return the most bytes that `_run` holds besides what it is given, and what it returns of them."""
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


class _Compared:
    """What a replacement is given, and what of its results is looked at: in the graph, and where that lies in the rewritten one."""

    def __init__(self, graph: StepGraph, rewritten: Rewritten, replacement: Replacement) -> None:
        self.given = _inputs(graph, replacement.old)
        results = {s for i in replacement.old for s in (*graph.creates[i], *graph.ops[i].writes)}
        self.wanted = {
            s
            for s in results
            if s in graph.kept or graph.storages[s].persistent or _used_outside(graph, s, replacement)
        }
        self.parts = [s for s, part in rewritten.sources.items() if part.storage in self.wanted]
        self.split = {rewritten.sources[s].storage for s in self.parts}
        self.lies_at = {s: rewritten.moved.get(s, s) for s in (*self.given, *self.wanted, *self.parts)}
        self.wanted_there = {self.lies_at[s] for s in (*(self.wanted - self.split), *self.parts)}


def form_key(graph: StepGraph, rewritten: Rewritten, replacement: Replacement) -> str:
    """Return the same for replacements that are alike."""
    return operator_key(_form_of_both(graph, rewritten, replacement))


def _form_of_both(graph: StepGraph, rewritten: Rewritten, replacement: Replacement) -> Any:
    taken = {s for i in replacement.new for s in rewritten.graph.reads[i]} & rewritten.sources.keys()
    sources = [rewritten.sources[s] for s in sorted(taken)]
    parts = tuple((v.dtype, v.shape, v.stride, v.offset) for v in sources)
    forms = _form(graph, replacement.old), _form(rewritten.graph, replacement.new)
    return (*forms, parts) if parts else forms


def _form(graph: StepGraph, ops: Sequence[int]) -> Any:
    """Return what two runs of ops have in common when they do the same to tensors of the same layout."""
    numbers: dict[int, int] = {}

    def value_form(v: int) -> Any:
        value = graph.values[v]
        number = numbers.setdefault(value.storage, len(numbers))
        return number, value.dtype, value.shape, value.stride, value.offset, graph.storages[value.storage].nbytes

    def form(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return value_form(argument.value)
        if isinstance(argument, tuple):
            return tuple(form(a) for a in argument)
        return type(argument).__name__, argument

    def op_form(op: Op) -> Any:
        outputs = tuple(None if v is None else value_form(v) for v in op.outputs)
        return op.name, tuple(map(form, op.args)), tuple((k, form(a)) for k, a in op.kwargs), outputs

    return tuple(op_form(graph.ops[i]) for i in ops)


def _difference(graph: StepGraph, rewritten: Rewritten, replacement: Replacement) -> str:
    """Return in which storage, and how, the new ops' results differ; empty where they do not."""
    compared = _Compared(graph, rewritten, replacement)
    wanted, split, lies_at = compared.wanted, compared.split, compared.lies_at
    edges = _edges(rewritten, replacement)
    contents = {s: _made_up(graph, s, replacement.old, edges) for s in compared.given}
    expected = _run(graph, replacement.old, contents, wanted)
    given_there = {lies_at[s]: content for s, content in contents.items()}
    try:
        actual = _run(rewritten.graph, replacement.new, given_there, compared.wanted_there, rewritten.sources)
    except (RuntimeError, IndexError, LayoutError) as error:  # torch refuses a call with the first two
        return str(error).partition("\n")[0]
    for s in sorted(wanted - split | {*compared.parts}):
        if lies_at[s] not in actual:
            return f"{rewritten.graph.label(s)} is not made"
        source = rewritten.sources.get(s)
        bits = expected[s] if source is None else _part(source, expected)
        found = actual[lies_at[s]]
        if s in replacement.sums:
            apart = _apart(bits, found, _sum(graph, s, replacement))
            if not apart <= CLOSE:  # no number is not close
                return f"{rewritten.graph.label(s)} differs by {apart:.1e} of its largest number"
        elif not torch.equal(bits, found):
            count = int(torch.count_nonzero(bits != found))
            return f"{rewritten.graph.label(s)} differs in {count} of {bits.numel()} bytes"
    return _apart_at_ends(graph, replacement.old) or _apart_at_ends(rewritten.graph, replacement.new)


def _apart_at_ends(graph: StepGraph, ops: Sequence[int]) -> str:
    """Return which operator gives other numbers where threads' shares end: few, which those made up may not show; empty where none does."""
    threads = torch.get_num_threads()
    for op in (graph.ops[i] for i in ops):
        rule = RULES.get(base_name(op))
        if threads == 1 or rule is None or rule.carry is not Carry.ELEMENTS or base_name(op) in MADE_OF_NOTHING:
            continue
        sizes = {math.prod(graph.values[v].shape) for v in operands(op)} - {1}
        if len(sizes) <= 1 and all(in_whole_vectors(size, threads) for size in sizes):
            continue
        args = [_filled(graph, a, None) for a in op.args]
        if rounds_apart(function_of(op), args, {k: _filled(graph, a, None) for k, a in op.kwargs}):
            return f"{op.name} rounds apart where a thread's share ends within a vector"
    return ""


def _apart(bits: torch.Tensor, found: torch.Tensor, value: Value) -> float:
    """Return how far two sums are apart at most, as a share of the largest number in the first."""
    expected, actual = (content.view(dtype(value.dtype)) for content in (bits, found))
    largest = float(expected.abs().max())
    apart = float((expected - actual).abs().max())
    return apart / largest if largest else math.inf if apart else 0.0


def _sum(graph: StepGraph, s: int, replacement: Replacement) -> Value:
    """Return the sum in this storage."""
    made = (v for i in replacement.old for v in graph.ops[i].outputs if v is not None)
    return next(graph.values[v] for v in made if graph.values[v].storage == s)


def _edges(rewritten: Rewritten, replacement: Replacement) -> list[int]:
    """Return the first and the last row of every part of a tensor that the new ops take: what a slip would show at."""
    taken = {s for i in replacement.new for s in rewritten.graph.reads[i]} & rewritten.sources.keys()
    parts = [rewritten.sources[s] for s in sorted(taken)]
    return sorted({row for p in parts for row in (p.offset // p.stride[0], p.offset // p.stride[0] + p.shape[0] - 1)})


def _used_outside(graph: StepGraph, s: int, replacement: Replacement) -> bool:
    return not set(graph.uses[s]) <= set(replacement.old)


def _inputs(graph: StepGraph, ops: Sequence[int]) -> list[int]:
    """Return the storages that `ops` take as they are before them."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for i in ops:
        found.update(dict.fromkeys(s for s in graph.reads[i] if s not in made))
        made.update(graph.creates[i])
    return list(found)


def _made_up(graph: StepGraph, s: int, ops: Iterable[int], edges: Sequence[int]) -> torch.Tensor:
    """Return bytes for a storage: numbers of the kind that the ops read it as, indices within their bounds, `edges` among them."""
    generator = torch.Generator().manual_seed(_SEED + s)
    value, bound = _read_as(graph, s, ops)
    flat = torch.empty(graph.storages[s].nbytes // ITEM_BYTES[value.dtype], dtype=dtype(value.dtype))
    if flat.is_floating_point():
        flat.normal_(0, _SPREAD, generator=generator)
    elif not flat.is_complex():
        flat.random_(0, bound, generator=generator)
        known = torch.tensor([edge for edge in edges if edge < bound][: flat.numel()])
        flat[: known.numel()] = known
    return _bytes(flat, graph.storages[s])


def _read_as(graph: StepGraph, s: int, ops: Iterable[int]) -> tuple[Value, int]:
    """Return a value in which ops read a storage, and the number that integers in it are below."""
    found: Value | None = None
    bound = 2
    for i in ops:
        op = graph.ops[i]
        for v in operands(op):
            if graph.values[v].storage == s and found is None:
                found = graph.values[v]
        table, index = (op.args[k] for k in LABELS[op.name]) if op.name in LABELS else (None, None)
        if not isinstance(index, Ref) or graph.values[index.value].storage != s:
            continue
        if isinstance(table, int):
            bound = table
        elif isinstance(table, Ref):
            shape = graph.values[table.value].shape
            bound = shape[0] if op.name in ("aten::embedding", "aten::index_select") else shape[-1]
    if found is None:
        raise ValueError(f"storage {s} is not read by these ops")
    return found, bound


def _bytes(tensor: torch.Tensor, storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (storage.nbytes,), (1,))


def _run(
    graph: StepGraph, ops: Sequence[int], given: dict[int, torch.Tensor], wanted: set[int],
    sources: Mapping[int, Value] = MappingProxyType({}),
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Run ops on copies of the given contents; return the bytes of the wanted storages.

    `sources`: of storages that hold a part of a given one from the start, which.
    """
    torch.manual_seed(_SEED)
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
    if op.name in CHECKS:
        return

    args, kwargs = [_filled(graph, a, held) for a in op.args], {k: _filled(graph, a, held) for k, a in op.kwargs}
    result = function_of(op)(*args, **kwargs)
    tensors = [t for t in (result if isinstance(result, list | tuple) else (result,)) if isinstance(t, torch.Tensor)]
    for v, tensor in zip(op.outputs, tensors, strict=True):
        if v is not None and (s := graph.values[v].storage) in graph.creates[i]:
            _check_layout(op, graph.values[v], tensor)
            held[s] = _bytes(tensor, graph.storages[s])


def _filled(graph: StepGraph, argument: Argument, held: Mapping[int, torch.Tensor] | None) -> Any:
    """Return an argument with tensors for values, of no memory where nothing is held; no closure, which would keep what it holds until cycles are collected."""
    if isinstance(argument, Ref):
        value = graph.values[argument.value]
        if held is None:
            return torch.empty(value.shape, dtype=dtype(value.dtype), device="meta")
        return _tensor(value, held)
    if isinstance(argument, Scalar):
        return _SCALAR
    if isinstance(argument, tuple):
        return [_filled(graph, a, held) for a in argument]
    return literal(argument)


def _tensor(value: Value, held: Mapping[int, torch.Tensor]) -> torch.Tensor:
    storage = held[value.storage].untyped_storage()
    return torch.empty(0, dtype=dtype(value.dtype)).set_(storage, value.offset, value.shape, value.stride)


def _part(value: Value, held: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy of a part of what is held, as bytes in row-major order."""
    return _tensor(value, held).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _check_layout(op: Op, value: Value, tensor: torch.Tensor) -> None:
    found = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    if found != (value.shape, value.stride, value.offset):
        raise LayoutError(f"{op.name} gives {found}, the graph says {value.shape}, {value.stride}, {value.offset}")


# -- as a process of its own


class _Pair(msgspec.Struct):
    """One graph, by its place among those of the request, and what it was rewritten to."""

    graph: int
    other: Any
    replacements: tuple[Replacement, ...]
    sources: dict[int, Value]
    moved: dict[int, int]


class _Request(msgspec.Struct):
    """What is to be compared, as bytes for `main`."""

    graphs: list[Any]
    pairs: list[_Pair]
    threads: int


def pack_request(pairs: Iterable[tuple[StepGraph, Rewritten]], threads: int) -> bytes:
    """Return what `main` reads."""
    pairs = list(pairs)
    graphs = list({id(graph): graph for graph, _ in pairs}.values())
    places = {id(graph): place for place, graph in enumerate(graphs)}
    packed = [
        _Pair(places[id(graph)], pack_graph(new.graph), new.replacements, dict(new.sources), dict(new.moved))
        for graph, new in pairs
    ]
    return msgspec.msgpack.encode(_Request([pack_graph(graph) for graph in graphs], packed, threads))


def read_differing(path: Path) -> tuple[tuple[Differing, ...], ...]:
    """Return what `main` wrote: of each pair, what differs."""
    return msgspec.msgpack.decode(path.read_bytes(), type=tuple[tuple[Differing, ...], ...])


Pair = tuple[StepGraph, Rewritten]
"""A graph and what it was rewritten to."""


class ComparisonRequest:
    """What is to be compared with so many threads."""

    def __init__(self, content: bytes) -> None:
        """Read what `pack_request` returned."""
        request = msgspec.msgpack.decode(content, type=_Request)
        graphs = [unpack_graph(graph) for graph in request.graphs]
        self.threads = request.threads
        self.pairs: list[Pair] = [
            (graphs[p.graph], Rewritten(unpack_graph(p.other), p.replacements, p.sources, p.moved))
            for p in request.pairs
        ]

    def parted(self, room_bytes: int) -> tuple[list[Pair], list[Pair]]:
        """Return the pairs with the replacements for which so many bytes of tensors are room enough, and with the others."""
        fitting, others = list[Pair](), list[Pair]()
        for graph, rewritten in self.pairs:
            small = frozenset(r for r in rewritten.replacements if _held_bytes(graph, rewritten, r) <= room_bytes)
            for part, taken in ((fitting, True), (others, False)):
                chosen = tuple(r for r in rewritten.replacements if (r in small) is taken)
                part.append((graph, replace(rewritten, replacements=chosen)))
        return fitting, others

    def differing(self, pairs: Iterable[Pair]) -> list[tuple[Differing, ...]]:
        """Return of each of these pairs what differs."""
        torch.set_num_threads(self.threads)
        return [differing(*pair) for pair in pairs]


def pack_differing(found: Sequence[tuple[Differing, ...]]) -> bytes:
    """Return what `read_differing` reads."""
    return msgspec.msgpack.encode(found)


def main(arguments: list[str]) -> int:
    """Compare what file `arguments[0]` asks for and write what differs to `arguments[1]`."""
    source, target = map(Path, arguments)
    request = ComparisonRequest(source.read_bytes())
    target.write_bytes(pack_differing(request.differing(request.pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
