"""What is compared in a process of its own is what is asked for, by the room that it needs."""

from pathlib import Path

from port_planner.exactness.replacements import Difference, compared_bytes
from port_planner.exactness.request import ComparisonRequest, pack_differing, pack_request, read_differing
from port_planner.tiling.gradients import split_gradients_by_mask
from tests.planner.exactness.wrong_halves import step, turned


def test_what_is_asked_and_found_is_read_as_it_was_packed(tmp_path: Path) -> None:
    graph = step()
    request = ComparisonRequest(
        pack_request([(graph, split_gradients_by_mask(graph)), (graph, turned(split_gradients_by_mask(graph), 0))], 1)
    )
    (tmp_path / "found").write_bytes(pack_differing(request.differing(request.pairs)))
    same, other = read_differing(tmp_path / "found")
    assert same == ()
    assert [type(one) for one in other] == [Difference]


def test_replacements_are_parted_by_the_room_that_they_need() -> None:
    graph = step()
    wrong = turned(split_gradients_by_mask(graph), 1)
    needs = sorted(compared_bytes(graph, wrong, one) for one in wrong.replacements)
    request = ComparisonRequest(pack_request([(graph, wrong), (graph, split_gradients_by_mask(graph))], 1))
    for room, counts in ((needs[0] - 1, (0, 3)), (needs[-1], (3, 0))):
        parts = request.parted(room)
        assert tuple(len(part[0][1].replacements) for part in parts) == counts
        found = [request.differing(part) for part in parts]
        assert [first + second for first, second in zip(*found, strict=True)] == request.differing(request.pairs)
        assert len(found[0][0]) + len(found[1][0]) == 1
