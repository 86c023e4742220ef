"""How many threads a bundle is made for."""

from typing import Any

import pytest
import torch

from port_agent.prepare import threads
from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_planner.ir.costs import OpCost
from port_planner.profiling.operator_profile import MeasuredCosts


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 3, 4)), (8, (1, 2, 4, 7, 8))]
)
def test_halves_of_the_cores_and_one_core_less_are_tried(cores: int, counts: tuple[int, ...]) -> None:
    assert threads.thread_choices(cores) == counts


@pytest.mark.parametrize(
    ("clusters", "counts"),
    [((4, 4), (1, 2, 4, 7, 8)), ((3, 5), (1, 2, 3, 4, 7, 8)), ((1, 3, 4), (1, 2, 4, 7, 8)), ((8,), (1, 2, 4, 7, 8))],
)
def test_the_fastest_cores_alone_are_tried(clusters: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert threads.thread_choices(8, clusters) == counts
    assert 4 in threads.thread_choices(6, (4, 2)) and 4 not in threads.thread_choices(6, (6,))
    assert threads.thread_choices(2, (4, 4)) == (1, 2), "a container has fewer than the machine"


@pytest.mark.parametrize(
    ("step_s", "fastest"),
    [
        ({1: 4.0, 2: 2.1, 4: 1.2}, 4),
        ({1: 4.0, 2: 2.1, 3: 1.5, 4: 1.49}, 3),
        ({1: 4.0, 2: 5.0, 4: 3.0}, 4),
        ({1: 1.0, 2: 1.1}, 1),
        ({1: 1.0, 2: 0.99}, 1),
        ({2: 3.0}, 2),
    ],
)
def test_the_fewest_threads_of_those_as_fast_as_the_fastest(
    monkeypatch: pytest.MonkeyPatch, step_s: dict[int, float], fastest: int
) -> None:
    def measure(
        _: MeasurementWorker, graphs: Any, count: int, compute_watts: float, progress: Any, shared: bytes
    ) -> MeasuredCosts:
        assert shared == b""
        progress("profile", 0.0)
        progress("profile", 1.0)
        step = OpCost(step_s[count], 0, step_s[count] * compute_watts)
        return MeasuredCosts(((step,), (OpCost(9.0 * count, 0, 0.0),)), count, 0)

    monkeypatch.setattr(MeasurementWorker, "measure", measure)
    shares: list[float] = []
    choice = threads.fastest({}, tuple(step_s), lambda count: 2.0 * count, lambda _, share: shares.append(share))
    assert (choice.threads, choice.step_s) == (fastest, step_s)
    assert choice.measured.base_bytes == fastest and choice.measured.ops[0][0].joules == step_s[fastest] * 2 * fastest
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_a_number_that_a_script_sets_counts_though_it_is_the_one_that_was_there() -> None:
    there, set_count = torch.get_num_threads(), torch.set_num_threads
    with threads.counts_set() as counts:
        assert not counts
        torch.set_num_threads(there)
    assert (counts, torch.get_num_threads()) == ([there], there)
    with pytest.raises(RuntimeError), threads.counts_set() as counts:
        torch.set_num_threads(-1)
    assert not counts and torch.set_num_threads is set_count
