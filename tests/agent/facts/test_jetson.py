"""Temperatures and memory of a Jetson, from recorded tegrastats."""

import asyncio
from pathlib import Path

import pytest

from port_agent.facts.jetson import parse_tegrastats, read_tegrastats
from tests.agent.trees import recorded


def test_recorded_tegrastats_single_lines() -> None:
    lines = [line for line in recorded("tegrastats/single_lines.txt").splitlines() if " RAM " in f" {line}"]
    parsed = [parse_tegrastats(line) for line in lines if not line.startswith("#")]
    assert len(parsed) >= 6
    assert all(line.hottest_c is not None and 25 < line.hottest_c < 100 for line in parsed)
    assert all(line.total_memory_bytes for line in parsed)
    assert parsed[0].hottest_c == 65.562
    assert parsed[1].hottest_c == 44.562  # absent zones read -256
    assert "cv0" not in parsed[1].zones_c
    assert parsed[2].hottest_c == 42.5  # PMIC@50C is a constant


@pytest.mark.parametrize(
    "name", ["agx_orin_l4t35_36_llm_then_idle.log", "xavier_nx_burn.log", "jetson_nano_pom5v_training.log"]
)
def test_recorded_tegrastats_logs(name: str) -> None:
    lines = [line for line in recorded(f"tegrastats/{name}").splitlines() if "RAM " in line]
    temperatures = [parse_tegrastats(line).hottest_c for line in lines]
    assert all(value is not None and 15 < value < 90 for value in temperatures)


@pytest.mark.process
def test_tegrastats_program_is_read_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "tegrastats"
    program.write_text("#!/bin/sh\nwhile :; do echo 'RAM 775/7620MB cpu@48.468C tj@49.156C'; sleep 0.01; done\n")
    program.chmod(0o755)
    assert asyncio.run(read_tegrastats(str(program))) == 49.156
