"""Lines of tegrastats: every release's forms, traps, damage."""

from collections.abc import Callable

import pytest

from port_agent.energy.sources.jetson_rails import gpu_rail
from port_agent.energy.sources.power_source import Coverage, SourceError
from port_agent.energy.sources.tegrastats import parse_line, tegrastats_source
from tests.agent.energy.recordings import local

LINES = local("tegrastats_lines.txt").splitlines(keepends=True)
TOTALS = (17.946, 6.755, 5.297, 4.761, 9.110, 4.548, 7.280)
"""Watts of each line by hand: VDD_IN, or VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0 on an AGX."""


@pytest.mark.parametrize(("line", "watts"), list(zip(LINES, TOTALS, strict=True)))
def test_line_forms_of_all_releases(line: str, watts: float) -> None:
    assert parse_line(line).total.watts == pytest.approx(watts)


def test_of_three_part_rails_the_first_part_is_now() -> None:
    assert parse_line(LINES[4]).rails["VDD_CPU_CV"] == 1.137


def test_agx_xavier_sums_all_rails() -> None:
    line = (
        "RAM 14700/15692MB (lfb 3x2MB) SWAP 898/8192MB (cached 23MB) CPU [0%@1190,0%@1190] EMC_FREQ 0% GR3D_FREQ 0% "
        "AO@30C GPU@30.5C CPU@31.5C GPU 463/463 CPU 618/618 SOC 2936/2936 CV 0/0 VDDRQ 309/309 SYS5V 3306/3306\n"
    )
    assert parse_line(line).total.watts == pytest.approx(7.632)


@pytest.mark.parametrize("line", LINES)
def test_line_cut_anywhere_is_never_a_number(line: str) -> None:
    for end in range(len(line)):
        with pytest.raises(SourceError):
            parse_line(line[:end])
        if line[end - 1 : end] != " " and end < len(line) - 2:
            # Even with a newline behind the cut, a number is either right or refused.
            try:
                watts = parse_line(line[:end] + "\n").total.watts
            except SourceError:
                continue
            assert watts == pytest.approx(parse_line(line).total.watts)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dirt", ["x", "\x00", " ", "-", "é"])
def test_garbled_total_is_never_a_number(line: str, dirt: str) -> None:
    rail = parse_line(line).total.rails[-1]
    start = line.index(f" {rail} ") + len(rail) + 3
    with pytest.raises(SourceError):
        _ = parse_line(line[:start] + dirt + line[start:]).total


def test_nano_and_xavier_and_orin_logs() -> None:
    nano = [parse_line(line) for line in local("jetson_nano_head.log").splitlines(keepends=True)]
    assert [line.total.watts for line in nano[:3]] == [0.920, 1.537, 2.793]
    orin = [parse_line(line) for line in local("agx_orin_edge.log").splitlines(keepends=True)]
    assert orin[-1].total.watts == pytest.approx(2.399 + 0.399 + 2.813)
    assert orin[-1].total.coverage is Coverage.RAIL_SUM


def test_all_recorded_lines(shared: Callable[[str], str]) -> None:
    lines = [line for line in shared("tegrastats/single_lines.txt").splitlines(keepends=True) if line[0] != "#"]
    totals = [parse_line(line).total.watts for line in lines]
    assert totals == pytest.approx([17.946, 6.755, 5.297, 12.479, 4.761, 13.907, 9.110, 4.548, 7.280])
    for name, count, first, last in (
        ("xavier_nx_burn.log", 103, 5.542, 13.751),
        ("agx_orin_l4t35_36_llm_then_idle.log", 15, 6.912, 5.611),
        ("jetson_nano_pom5v_training.log", 114, 0.920, 1.613),
    ):
        watts = [parse_line(line).total.watts for line in shared(f"tegrastats/{name}").splitlines(keepends=True)]
        assert (len(watts), watts[0], watts[-1]) == (count, pytest.approx(first), pytest.approx(last))


@pytest.mark.parametrize("line", LINES)
def test_the_gpus_rail_is_known_on_every_recorded_board_that_has_one(line: str) -> None:
    gpu = parse_line(line).total.gpu
    named = [rail for rail in parse_line(line).rails if "GPU" in rail]
    assert ([] if gpu is None else [gpu.name]) == named


def test_the_rail_that_feeds_the_gpu_is_a_part_of_each_reading() -> None:
    class Output:
        def __init__(self, line: str) -> None:
            self.line = line

        def newest(self, now_s: float) -> str:
            return self.line

        def close(self) -> None:
            """Nothing runs."""

    found = []
    for line in LINES:
        reading = tegrastats_source(Output(line)).read(3.0)  # type: ignore[arg-type]
        assert reading is not None and reading.watts is not None
        assert (reading.gpu is None) == (gpu_rail(parse_line(line).rails) is None)
        assert reading.gpu is None or 0 <= reading.gpu.watts < reading.watts
        found.append(reading.gpu)
    assert found[4] is not None and found.count(None) < len(found) - 2
    assert found[4].watts == parse_line(LINES[4]).rails["VDD_GPU_SOC"]
    assert found[4].covers == "VDD_GPU_SOC, which feeds the GPU with the rest of the chip's core"
