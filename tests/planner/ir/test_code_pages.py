"""Code that is not running leaves resident memory, and comes back when it runs again."""

import subprocess
import sys

import pytest

from planner.ir.code_pages import code_mappings, data_mappings

SMAPS = """\
7f0000000000-7f0000100000 r-xp 00001000 fe:00 1234                       /usr/lib/with space/libtorch_cpu.so
Size:               1024 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex mr mw me
7f0000100000-7f0000200000 r-xp 00001000 fe:00 1235                       /usr/lib/librelocated.so
Anonymous:             8 kB
Swap:                  0 kB
7f0000200000-7f0000300000 r--p 00001000 fe:00 1234                       /usr/lib/with space/libtorch_cpu.so
Anonymous:             0 kB
Swap:                  0 kB
7f0000300000-7f0000400000 rw-p 00001000 fe:00 1234                       /usr/lib/with space/libtorch_cpu.so
Anonymous:             0 kB
7f0000400000-7f0000500000 r-xp 00000000 00:00 0
Anonymous:             0 kB
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f0000500000-7f0000600000 r--p 00000000 fe:00 99                         /home/weights.safetensors
Anonymous:             0 kB
7f0000600000-7f0000700000 r-xp 00000000 fe:00 99                         /usr/bin/python3.11
Anonymous:             0 kB
7f0000700000-7f0000800000 r--p 00000000 fe:00 99                         /usr/bin/python3.11
Anonymous:             0 kB
Swap:                  4 kB
"""

PROGRAM = """
import torch
from planner.ir.code_pages import release_code_pages
from planner.ir.process_memory import resident_bytes

weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
before = torch.linalg.matrix_exp(weight)
held = resident_bytes()
release_code_pages()
print(held - resident_bytes())
assert torch.equal(torch.linalg.matrix_exp(weight), before)
"""


def test_only_clean_code_and_constants_of_executable_files_are_released() -> None:
    assert code_mappings(SMAPS) == [
        (0x7F0000000000, 0x7F0000100000),
        (0x7F0000200000, 0x7F0000300000),
        (0x7F0000600000, 0x7F0000700000),
    ]
    assert data_mappings(SMAPS) == [(0x7F0000500000, 0x7F0000600000)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_loaded_torch_shrinks_and_goes_on_with_the_same_numbers() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 20 << 20, "bytes that left resident memory"
