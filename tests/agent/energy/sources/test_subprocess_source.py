"""The newest line of a program that runs beside, and its end."""

import select
import sys

import pytest

from port_agent.energy.sources.power_source import SourceError
from port_agent.energy.sources.subprocess_source import ChildOutput
from port_agent.energy.sources.tegrastats import NAME, tegrastats_source
from tests.agent.energy.recordings import local

pytestmark = pytest.mark.process

LINES = local("tegrastats_lines.txt").splitlines(keepends=True)


def _child(script: str) -> ChildOutput:
    return ChildOutput(NAME, (sys.executable, "-c", script), r"\n", stale_after_s=5.0)


def _first(output: ChildOutput) -> float:
    """Return the watts of the first record, waiting until the child has printed or ended."""
    source = tegrastats_source(output)
    reading = source.read(0.0)
    while reading is None or reading.watts is None:
        select.select([output.fileno()], [], [], 30.0)
        reading = source.read(0.0)
    return reading.watts


def test_newest_line_of_a_real_child_process() -> None:
    script = f"import time; print({LINES[0] + LINES[3]!r}, end='', flush=True); time.sleep(60)"
    output = _child(script)
    try:
        assert _first(output) == pytest.approx(4.761)
        with pytest.raises(SourceError, match="silent"):
            tegrastats_source(output).read(100.0)
    finally:
        output.close()


def test_child_that_dies_or_does_not_exist() -> None:
    with pytest.raises(SourceError, match="ended with code 3"):
        _first(_child("raise SystemExit(3)"))
    missing = tegrastats_source(ChildOutput(NAME, ("/nonexistent/tegrastats",), r"\n", 5.0))
    with pytest.raises(SourceError, match="cannot be started"):
        missing.read(0.0)
    assert not missing.self_test(0.0).ok
