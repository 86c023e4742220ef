"""The placement benchmark runs what it chose; here on the simulated device, which it is not
known to outside of tests.
"""

import pytest

from benchmarks.placement import main
from port_agent.backend import choose
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process


def test_without_the_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", "--execute", "abacus"]) == 0
    assert "nothing was executed: this step is for the device 'abacus'" in capsys.readouterr().out


@pytest.mark.long
def test_a_divided_step_runs_and_has_the_bits_of_its_operators(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    SimBackend().use_own_bits(True)
    monkeypatch.setitem(choose._MADE_BY, NAME, SimBackend)
    assert main(["gpt2", "--execute", NAME, "--time-limit", "5"]) == 0
    said = capsys.readouterr().out
    assert "divided" in said and "those of its operators" in said and "DIFFERENT" not in said
