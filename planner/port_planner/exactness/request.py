"""Comparison requests and results as bytes, for a process with the bundle's number of threads that compares."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from port_planner.exactness.replacements import Difference, compared_bytes, differing
from port_planner.ir.bundle.codec import pack_graph, unpack_graph
from port_planner.ir.graph import StepGraph, Value
from port_planner.tiling.rewriting import Replacement, RewrittenGraph

Pair = tuple[StepGraph, RewrittenGraph]
"""A graph and its rewritten form."""


class _Pair(msgspec.Struct):
    """A graph, by its index in the request, and its rewritten form."""

    graph: int
    other: Any
    replacements: tuple[Replacement, ...]
    sources: dict[int, Value]
    moved: dict[int, int]


class _Request(msgspec.Struct):
    """The packed form of a request."""

    graphs: list[Any]
    pairs: list[_Pair]
    threads: int


def pack_request(pairs: Iterable[Pair], threads: int) -> bytes:
    """Return the bytes that `ComparisonRequest` reads."""
    pairs = list(pairs)
    graphs = list({id(graph): graph for graph, _ in pairs}.values())
    places = {id(graph): place for place, graph in enumerate(graphs)}
    packed = [
        _Pair(places[id(graph)], pack_graph(new.graph), new.replacements, dict(new.sources), dict(new.moved))
        for graph, new in pairs
    ]
    return msgspec.msgpack.encode(_Request([pack_graph(graph) for graph in graphs], packed, threads))


def read_differing(path: Path) -> tuple[tuple[Difference, ...], ...]:
    """Return the differences of each pair, from the output of `pack_differing`."""
    return msgspec.msgpack.decode(path.read_bytes(), type=tuple[tuple[Difference, ...], ...])


class ComparisonRequest:
    """The comparisons to make with a given number of threads."""

    def __init__(self, content: bytes) -> None:
        """Read the output of `pack_request`."""
        request = msgspec.msgpack.decode(content, type=_Request)
        graphs = [unpack_graph(graph) for graph in request.graphs]
        self.threads = request.threads
        self.pairs: list[Pair] = [
            (graphs[p.graph], RewrittenGraph(unpack_graph(p.other), p.replacements, p.sources, p.moved))
            for p in request.pairs
        ]

    def parted(self, free_bytes: int) -> tuple[list[Pair], list[Pair]]:
        """Return the pairs with those replacements that fit into that many bytes of tensors, and
        the pairs with the others.
        """
        fitting, others = list[Pair](), list[Pair]()
        for graph, rewritten in self.pairs:
            small = frozenset(r for r in rewritten.replacements if compared_bytes(graph, rewritten, r) <= free_bytes)
            for part, taken in ((fitting, True), (others, False)):
                chosen = tuple(r for r in rewritten.replacements if (r in small) is taken)
                part.append((graph, replace(rewritten, replacements=chosen)))
        return fitting, others

    def differing(self, pairs: Iterable[Pair]) -> list[tuple[Difference, ...]]:
        """Return the differences of each of these pairs."""
        torch.set_num_threads(self.threads)
        return [differing(*pair) for pair in pairs]


def pack_differing(found: Sequence[tuple[Difference, ...]]) -> bytes:
    """Return the bytes that `read_differing` reads."""
    return msgspec.msgpack.encode(found)
