"""Loading torch for a worker takes less at its peak than importing it, and gives the same torch."""

import subprocess
import sys

import pytest

from port_agent.prepare.measurement.dry_run import loading_peak

pytestmark = pytest.mark.process

PROGRAM = """
import sys
{load}
import torch
from port_planner.base.process_memory import peak_resident_bytes
assert torch.nn.functional.relu(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
print(peak_resident_bytes())
"""
THRIFTY = "from port_agent.system.torch_loading import load_torch; load_torch(); assert 'torch' in sys.modules"

COLLECTIONS = 100
"""More are made while torch is imported, fewer by all else."""


def peak(load: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", PROGRAM.format(load=load)]))


@pytest.mark.skipif(sys.platform != "linux", reason="code pages are given back on Linux only")
def test_the_peak_is_lower_and_torch_works() -> None:
    plain = peak("")
    assert peak(THRIFTY) < plain - (10 << 20)
    assert loading_peak() < plain


def test_a_process_that_has_torch_keeps_it() -> None:
    assert peak(f"import torch as first; {THRIFTY}; assert sys.modules['torch'] is first") > 0


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_meanwhile_and_afterwards_as_before(*, collects: bool) -> None:
    program = f"""
import gc, sys
{"" if collects else "gc.disable()"}
{THRIFTY}
print(gc.isenabled(), sum(generation["collections"] for generation in gc.get_stats()))
"""
    said = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert said[0] == str(collects) and int(said[1]) < COLLECTIONS


def test_what_was_imported_is_left_out_of_collections() -> None:
    program = f"import gc, sys; {THRIFTY}; print(gc.get_freeze_count(), len(gc.get_objects()))"
    frozen, collected = map(int, subprocess.check_output([sys.executable, "-c", program]).split())
    assert frozen > 50_000 > collected


def test_a_worker_listens_before_torch_is_there() -> None:
    program = "import sys, port_agent.training.worker; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"
