"""What the model offers: return stages within the breadth, nothing that cannot be, everything that is known already."""

from dataclasses import replace

import pytest

from port_planner.milp.columns import LARGE_TRANSFER_PERCENT, Breadth
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import (
    Choice,
    GapDecision,
    Packing,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Stage,
    Tensor,
)

STAGES = tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(10))
FLASH = Paging(0, 0.1, 0.1, 4.0, 6.0)


def chain(**changes: object) -> Problem:
    """Return a step in which c is made from b, b from a; all three are idle while a large tensor is in use."""
    tensors = [
        Tensor("a", 10, (0, 1, 9), (0,), rematerializations=(Rematerialization(1.0, 1.0, ()),), paging=(FLASH,)),
        Tensor("b", 10, (1, 2, 8), (1,), rematerializations=(Rematerialization(1.0, 2.0, ((0, 0),)),), paging=(FLASH,)),
        Tensor("c", 10, (2, 7), (2,), rematerializations=(Rematerialization(1.0, 3.0, ((1, 0),)),), paging=(FLASH,)),
        Tensor("large", 10, (4, 5), (4,), rematerializations=(None,)),
    ]
    return replace(Problem(STAGES, tuple(tensors), 25), **changes)  # type: ignore[arg-type]


def stages_of(formulation: Formulation, g: int) -> tuple[list[int], list[int]]:
    """Return at which stages a gap may end by rematerialization and by a page-in."""
    columns = formulation.gaps[g]
    return sorted(columns.recompute), sorted(s for s, _ in columns.page)


C = 3
"""The gap of c: after 2, before 7."""


@pytest.mark.parametrize(
    ("breadth", "recompute", "page"),
    [
        (Breadth(), [3, 4, 5, 6, 7], [4, 5, 6, 7]),
        (Breadth(early_pages=False), [3, 4, 5, 6, 7], [7]),
        (Breadth(window=2), [5, 6, 7], [5, 6, 7]),
        (Breadth(window=0, early_pages=False), [7], [7]),
        (Breadth(paging=False), [3, 4, 5, 6, 7], []),
        (Breadth(recompute=False), [], [4, 5, 6, 7]),
    ],
)
def test_a_gap_may_end_where_the_breadth_says(breadth: Breadth, recompute: list[int], page: list[int]) -> None:
    formulation = Formulation(chain(semantics=Semantics.ELASTIC), breadth)
    assert formulation.problem.gaps[C].tensor == 2 and stages_of(formulation, C) == (recompute, page)


@pytest.mark.parametrize(
    ("depth", "intermediates"),
    [(0, set()), (1, {(1, 7)}), (2, {(1, 7), (0, 7), (0, 8)}), (None, {(1, 7), (0, 7), (0, 8)})],
)
def test_a_chain_of_intermediates_goes_as_deep_as_the_breadth_says(
    depth: int | None, intermediates: set[tuple[int, int]]
) -> None:
    offered = set(Formulation(chain(), Breadth(window=0, depth=depth)).intermediates)
    assert offered - {(0, 8)} == intermediates - {(0, 8)}
    assert ((0, 8) in offered) is (depth is None or depth >= 1)


def test_what_is_known_is_offered_outside_the_breadth_too() -> None:
    narrow = Breadth(window=0, depth=0, early_pages=False)
    known = Schedule((Choice(C, 4, GapDecision.RECOMPUTE),), ((0, 4), (1, 4)))
    assert Formulation(chain(), narrow).start_values(known) is None
    formulation = Formulation(chain(), narrow, known)
    assert formulation.start_values(known) is not None and stages_of(formulation, C)[0] == [4, 7]
    paged = Schedule((Choice(C, 5, GapDecision.PAGE),))
    assert Formulation(chain(), narrow, paged).start_values(paged) is not None


@pytest.mark.parametrize(
    ("changes", "decided"),
    [
        ({}, {0, 1, C}),
        ({"ram_bytes": None}, set()),
        ({"ram_bytes": 40}, set()),
        ({"ram_bytes": 39}, {0, 1, C}),
    ],
)
def test_only_gaps_where_memory_is_short_are_decided(changes: dict[str, object], decided: set[int]) -> None:
    formulation = Formulation(chain(**changes), Breadth())
    live = {g for g, gap in enumerate(formulation.problem.gaps) if not gap.dead}
    assert set(formulation.gaps) == decided and formulation.fixed_gaps >= live - decided


@pytest.mark.parametrize("change", [{"pinned": True}, {"nbytes": 0}, {"paging": (), "rematerializations": (None,)}])
def test_what_cannot_or_need_not_move_is_kept(change: dict[str, object]) -> None:
    a, b, c, large = chain().tensors
    problem = replace(chain(), tensors=(a, b, replace(c, **change), large))  # type: ignore[arg-type]
    assert C not in Formulation(problem, Breadth()).gaps


def test_what_alone_takes_longer_than_the_deadline_leaves_is_not_offered() -> None:
    a, b, c, large = chain().tensors
    c = replace(c, packings=(Packing(1, 1.0, 1.0),))
    for slack, offered in ((1.0, True), (0.99, False)):
        problem = replace(chain(), tensors=(a, b, c, large), deadline_s=10.0 + slack)
        formulation = Formulation(problem, Breadth())
        assert bool(formulation.gaps[C].recompute) is offered and (formulation.gaps[C].packed is not None) is offered
        assert formulation.gaps[C].page, "beside compute a page takes no time"


def test_an_input_is_there_kept_back_or_as_an_intermediate() -> None:
    formulation = Formulation(chain(), Breadth())
    columns = formulation.gaps[1]
    assert formulation.presence(1, 0, 2) is None, "in use there"
    assert formulation.presence(1, 0, 1) == [], "only born there"
    assert formulation.presence(1, 5, 2) == [], "another version"
    assert formulation.presence(3, 0, 9) == [], "gone for good"
    assert formulation.presence(1, 0, 5) == [(columns.presence[5], 1.0), (formulation.intermediates[1, 5], 1.0)]
    fixed = Formulation(replace(chain(), ram_bytes=40), Breadth())
    assert fixed.presence(1, 0, 5) is None, "kept whatever is decided"


def test_units_bring_bytes_joules_and_seconds_near_one() -> None:
    formulation = Formulation(chain(), Breadth())
    assert (formulation.byte_scale, formulation.joule_scale, formulation.second_scale) == (0.25, 10.0, 0.1)
    without_paging = replace(chain(), tensors=tuple(replace(t, paging=()) for t in chain().tensors))
    assert Formulation(without_paging, Breadth()).joule_scale == 2.0
    nothing = Problem((Stage("s", 0.0, 0.0),), (), None)
    empty = Formulation(nothing, Breadth())
    assert (empty.byte_scale, empty.joule_scale, empty.second_scale) == (0.01, 1.0, 1.0)


def test_a_bound_pays_a_rematerializations_own_share_only() -> None:
    shared = Rematerialization(1.0, 8.0, (), own_share=0.25)
    exact, bound = (Formulation(chain(), Breadth(optimistic=optimistic)) for optimistic in (False, True))
    assert exact.rematerialization_joules(shared) == pytest.approx(0.8)
    assert bound.rematerialization_joules(shared) == pytest.approx(0.2)


def test_a_large_transfer_hides_whole_or_not_at_all_and_a_small_one_in_part() -> None:
    formulation = Formulation(chain(semantics=Semantics.ELASTIC), Breadth())
    limit = LARGE_TRANSFER_PERCENT * formulation.byte_scale
    for nbytes, whole in ((limit * 0.99, False), (limit * 1.01, True)):
        column = formulation.hiding_column("h", nbytes)  # type: ignore[arg-type]
        assert formulation.model.integral[column] is whole and (column in formulation.hiding) is whole
        assert column not in formulation.decisions(), "it follows from the decisions"
