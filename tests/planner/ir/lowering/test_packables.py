"""What could be packed: idle contents of temporaries, by the writes that made them, with the codec for their type."""

import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.costs import Codec
from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.lowering.packables import packables, read_packed


def step() -> StepGraph:
    """Return the step of a net with a residual sum in place, pooling and a boolean mask."""
    model = nn.ModuleList(
        [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(64, 2)]
    )

    def loss(m: nn.ModuleList, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = functional.relu(m[1](m[0](x)), inplace=True)
        h = functional.relu_(m[2](h).add_(h))
        h = functional.max_pool2d(h, 2)
        h = torch.where(h > 0.5, h, 0.1 * h)
        return functional.cross_entropy(m[3](h.flatten(1)), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(model, loss, optimizer, (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))).graphs["step"]


def test_idle_temporaries_are_found_with_the_codec_for_their_type() -> None:
    graph = step()
    found = list(packables(graph))
    assert {p.codec for p in found} >= {Codec.BITS, Codec.NARROW, Codec.BITMAP}
    types = {Codec.BITS: 1, Codec.NARROW: 8, Codec.BITMAP: 4, Codec.PAIR: 4, Codec.SIGN: 4, Codec.INSIDE: 4}
    for p in found:
        assert graph.storages[p.storage].role is Role.TEMPORARY and p.storage not in graph.kept
        assert p.item_bytes == types[p.codec] and p.version == sum(w <= p.after for w in graph.writers[p.storage])
        following = min(u for u in graph.uses[p.storage] if u > p.after)
        assert following > p.after + 1
    assert len({(p.storage, p.version) for p in found}) == len(found)


def classifier(pool: type[nn.Module], *, last: bool) -> StepGraph:
    """Return the step of a net whose first activation goes into a pool; `last`: nothing else asks for its values."""
    model = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), pool(2), nn.Linear(64, 2)])

    def loss(m: nn.ModuleList, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = functional.relu(m[0](x))
        extra = 0.0 if last else (h * h).sum()
        return functional.cross_entropy(m[2](m[1](h).flatten(1)), y) + extra

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(model, loss, optimizer, (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))).graphs["step"]


def test_an_activation_that_is_only_pooled_may_keep_its_signs_alone() -> None:
    for last, codec in ((True, Codec.SIGN), (False, Codec.BITMAP)):
        graph = classifier(nn.MaxPool2d, last=last)
        relu = next(i for i, op in enumerate(graph.ops) if op.name == "aten::relu")
        (s,) = graph.creates[relu]
        assert {p.codec for p in packables(graph) if p.storage == s} == {codec}
        assert read_packed(graph, s, graph.uses[s][-2], Codec.SIGN) and read_packed(graph, s, relu, Codec.SIGN) is False
    assert not read_packed(graph, s, graph.uses[s][-1], Codec.SIGN), "nothing follows"


def test_what_is_clipped_twice_between_other_numbers_is_not_asked_one_thing() -> None:
    for highs, codec in (((6.0, 6.0), Codec.INSIDE), ((6.0, 5.0), Codec.BITMAP)):
        model = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 2)])

        def loss(m: nn.ModuleList, x: torch.Tensor, y: torch.Tensor, highs: tuple[float, ...] = highs) -> torch.Tensor:
            h = m[0](x)
            return functional.cross_entropy(m[1](sum([functional.hardtanh(h, 0.0, high) for high in highs])), y)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graph = capture_step(model, loss, optimizer, (torch.randn(2, 8), torch.tensor([0, 1]))).graphs["step"]
        (s,) = graph.creates[next(i for i, op in enumerate(graph.ops) if op.name == "aten::addmm")]
        assert {p.codec for p in packables(graph) if p.storage == s} == {codec}


def test_what_is_changed_in_place_is_found_as_it_lies_idle() -> None:
    """The output of a norm on which ReLU runs in place is idle afterwards only."""
    graph = step()
    relu = next(i for i, op in enumerate(graph.ops) if op.name == "aten::relu_")
    (s,) = graph.ops[relu].writes
    assert [p.version for p in packables(graph) if p.storage == s] == [2]


def test_what_is_too_small_is_left_out() -> None:
    graph = step()
    largest = max(graph.storages[p.storage].nbytes for p in packables(graph))
    assert {graph.storages[p.storage].nbytes for p in packables(graph, least_bytes=largest)} == {largest}
    assert not list(packables(graph, least_bytes=largest + 1))


def test_numbers_made_of_a_mask_are_two_as_those_drawn_at_once_are() -> None:
    """Tiles of dropout make them so: each part of a mask that was drawn whole, as bytes."""
    model = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 2)])

    def loss(m: nn.ModuleList, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = m[0](x)
        mask = torch.empty(h.shape, dtype=torch.bool).bernoulli_(0.9)
        numbers = mask.to(torch.float32), h.detach().to(torch.float64).to(torch.float32)
        kept, counted = (torch.ops.aten.div_.Scalar(one, 0.9) for one in numbers)
        return functional.cross_entropy(m[1](h * kept * counted), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, loss, optimizer, (torch.randn(2, 8), torch.tensor([0, 1]))).graphs["step"]
    divided = [s for i, op in enumerate(graph.ops) if op.name == "aten::div_.Scalar" for s in op.writes]
    found = {p.storage: p.codec for p in packables(graph)}
    assert [found[s] for s in divided] == [Codec.PAIR, Codec.BITMAP]
