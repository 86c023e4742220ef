"""What stands in bundles of others: the numbers of actions, and a plan that decides nothing."""

from port_planner.ir.plan import Action, Decision, Plan


def test_the_numbers_of_actions_stand_in_bundles() -> None:
    numbers = {"PAGE": 1, "RECOMPUTE": 2, "INTERMEDIATE": 3, "PACK": 4, "PACK_PAGE": 5}
    assert {action.name: int(action) for action in Action} == numbers


def test_decisions_sort_by_storage_then_time_as_a_plan_packs_them_best() -> None:
    found = [Decision(2, 0, 5, Action.PAGE), Decision(1, 7, 9, Action.PAGE), Decision(1, 2, 9, Action.RECOMPUTE)]
    assert [(d.storage, d.after) for d in sorted(found)] == [(1, 2), (1, 7), (2, 0)]


def test_without_decisions_a_plan_keeps_everything_and_has_no_limit() -> None:
    assert (Plan().decisions, Plan().order, Plan().ram_bytes, Plan().strategy) == ((), (), 0, "keep-all")
