"""Costs of operators are measured once for each machine and version, and only the same ones are taken again."""

import time
from pathlib import Path

import pytest
import torch

from port_planner.profiling import calls, kept_costs, operator_profile
from port_planner.profiling.kept_costs import KEPT_DAYS, KeptCost, context, keep_costs, operator_key, read_costs
from port_planner.profiling.operator_profile import profile_operators
from tests.planner.steps import tiny_step


@pytest.mark.slow
def test_a_second_profile_measures_nothing_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tiny_step().graphs["step"]
    first = profile_operators([graph], compute_watts=2.0, kept_in=tmp_path)

    def never(*_: object) -> tuple[float, int]:
        raise AssertionError("measured again")

    monkeypatch.setattr(operator_profile, "timed", never)
    again = profile_operators([graph], compute_watts=4.0, kept_in=tmp_path)
    for before, after in zip(first.ops[0], again.ops[0], strict=True):
        assert (after.seconds, after.workspace_bytes) == (before.seconds, before.workspace_bytes)
        assert after.joules == 2 * before.joules


@pytest.mark.slow
def test_costs_alone_run_no_operator_whose_cost_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tiny_step().graphs["step"]
    first = profile_operators([graph], compute_watts=2.0, kept_in=tmp_path)

    def never(_: object) -> None:
        raise AssertionError("an operator ran")

    monkeypatch.setattr(calls.Call, "ready", never)
    again = profile_operators([graph], compute_watts=2.0, kept_in=tmp_path, resident=False)
    assert again.ops == first.ops
    assert (again.retained_bytes, again.released_bytes) == (0, 0)
    with pytest.raises(AssertionError, match="an operator ran"):
        profile_operators([graph], compute_watts=2.0, kept_in=tmp_path)


def test_another_version_number_of_threads_or_cluster_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {context(threads, 1 << 20, workspace_seen=seen) for threads in (1, 2) for seen in (False, True)}
    monkeypatch.setattr(torch, "__version__", "99.0")
    names.add(context(1, 1 << 20, workspace_seen=False))
    monkeypatch.setattr(kept_costs, "identity", lambda text: ("abacus",))
    names.add(context(1, 1 << 20, workspace_seen=False))
    monkeypatch.setattr(kept_costs, "_some_cores", lambda: [4, 5])
    names.add(context(1, 1 << 20, workspace_seen=False))
    assert len(names) == 7


def test_old_and_damaged_costs_are_not_taken(tmp_path: Path) -> None:
    now = time.time()
    day = 86400
    keep_costs(
        tmp_path, "here", {"young": KeptCost(1.0, 2, now - day), "old": KeptCost(1.0, 2, now - (KEPT_DAYS + 1) * day)}
    )
    keep_costs(tmp_path, "here", {"next": KeptCost(3.0, 4, now)})
    assert read_costs(tmp_path, "here", now).keys() == {"young", "next"}
    assert read_costs(tmp_path, "elsewhere", now) == {}
    whole = (tmp_path / "here").read_bytes()
    for place in range(0, len(whole), 3):
        (tmp_path / "here").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_costs(tmp_path, "here", now) == {}
    (tmp_path / "here").write_bytes(whole[:5])
    assert read_costs(tmp_path, "here", now) == {}


def test_costs_of_a_moment_in_the_future_are_taken(tmp_path: Path) -> None:
    keep_costs(tmp_path, "here", {"one": KeptCost(1.0, 2, time.time() + 1.0)})
    keep_costs(tmp_path, "here", {"two": KeptCost(1.0, 2, time.time() + 172800.0)})
    assert read_costs(tmp_path, "here", time.time()).keys() == {"one"}


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep_costs(tmp_path / "file", "here", {"one": KeptCost(1.0, 2, 3.0)})
    keep_costs(None, "here", {"one": KeptCost(1.0, 2, 3.0)})
    assert read_costs(None, "here", 3.0) == {}


def test_operators_that_differ_in_a_shape_differ_in_their_key() -> None:
    assert operator_key(("aten::mm", (2, 3))) != operator_key(("aten::mm", (2, 4)))
