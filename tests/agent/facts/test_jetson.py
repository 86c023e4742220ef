"""Temperatures of a Jetson, from recorded tegrastats."""

import asyncio
from pathlib import Path

import pytest

from port_agent.facts.jetson import read_tegrastats, zone_temperatures
from tests.agent.trees import recorded


def test_recorded_tegrastats_single_lines() -> None:
    lines = [line for line in recorded("tegrastats/single_lines.txt").splitlines() if " RAM " in f" {line}"]
    zones = [zone_temperatures(line) for line in lines if not line.startswith("#")]
    hottest = [max(celsius.values()) for celsius in zones]
    assert len(zones) >= 6 and all(25 < value < 100 for value in hottest)
    assert hottest[:3] == [65.562, 44.562, 42.5]  # absent zones read -256, PMIC@50C is a constant
    assert "cv0" not in zones[1]


@pytest.mark.parametrize(
    "name", ["agx_orin_l4t35_36_llm_then_idle.log", "xavier_nx_burn.log", "jetson_nano_pom5v_training.log"]
)
def test_recorded_tegrastats_logs(name: str) -> None:
    lines = [line for line in recorded(f"tegrastats/{name}").splitlines() if "RAM " in line]
    assert all(15 < max(zone_temperatures(line).values()) < 90 for line in lines)


@pytest.mark.process
def test_tegrastats_program_is_read_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "tegrastats"
    program.write_text("#!/bin/sh\nwhile :; do echo 'RAM 775/7620MB cpu@48.468C tj@49.156C'; sleep 0.01; done\n")
    program.chmod(0o755)
    assert asyncio.run(read_tegrastats(str(program))) == 49.156
