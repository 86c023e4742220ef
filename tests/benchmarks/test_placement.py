"""No division that the placement benchmark prints is worse than the better of CPU and GPU."""

import pytest

from benchmarks.placement import main, two_devices
from port_planner.ir.boards import load_board
from port_planner.search.placement.operator_devices import on_one_device
from tests.planner.steps import tiny_step


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--unified"]])
def test_it_prints_a_table_and_nothing_is_worse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", "--time-limit", "10", *words]) == 0
    said = capsys.readouterr().out
    assert "synthetic" in said and "joules" in said and "seconds" in said


def test_the_synthetic_gpu_is_slower_where_starting_takes_most() -> None:
    """Small operators are what a CPU keeps."""
    problem = two_devices(tiny_step().graphs["step"], load_board("pi5"), unified=False)
    cpu, gpu = on_one_device(problem).values()
    assert cpu.seconds < gpu.seconds
