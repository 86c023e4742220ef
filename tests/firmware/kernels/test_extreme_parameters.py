"""Parameters may come from a damaged board: whatever they are, kernels do nothing undefined
and stay in their memory.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.outcome import AttackOutcome, Survived

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import numpy as np
from port_planner.mcu import HostEngine, UpdateOptions, UpdateRounding, compile_model
from tests.planner.mcu.networks import BUILDS

name, *flags = sys.argv[1:]
module, data = BUILDS[name]()
model = compile_model(module, data, name=name, q88=True)
engine = HostEngine(model, ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *flags))
samples, size = model.quantize_input(data), len(engine.parameters)
rng = np.random.default_rng(1)
extremes = np.array([2**31 - 1, -(2**31), 2**31 - 128, 0], "<i4")
images = [np.full(size, byte, np.uint8) for byte in (0x7F, 0x80, 0x00, 0xFF)]
images += [rng.integers(0, 256, size, np.uint8) for _ in range(8)]
images += [np.resize(np.roll(extremes, k).view(np.uint8), size) for k in range(4)]
tried = 0
for image in images:
    for rule in UpdateRounding:
        engine.set_options(UpdateOptions(1e30, rule))
        for number, sample in enumerate([samples[0], np.full_like(samples[0], -128), np.full_like(samples[0], 127)]):
            engine.parameters = image.tobytes()
            engine.infer(sample)
            engine.train(sample, number)
            tried += 1
print(tried)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("flags", [(), ("-DPORT_SIMD_EMULATE",)], ids=["scalar", "simd"])
@pytest.mark.parametrize("name", ["every_layer", "hidden_linear", "stream", "recurrent"])
def test_extreme_parameters_are_defined(name: str, flags: tuple[str, ...], survived: Survived) -> None:
    files = [
        subprocess.check_output(["cc", f"-print-file-name=lib{n}.so"], text=True).strip() for n in ("asan", "ubsan")
    ]
    fixed_layout = ["setarch", "-R"] if shutil.which("setarch") else []  # a sanitizer's shadow may collide with another
    done = subprocess.run(
        [*fixed_layout, sys.executable, "-c", PROGRAM, name, *flags],
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(files),
            "ASAN_OPTIONS": "detect_leaks=0",  # of Python and its modules, which the process ends with
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    failed = done.returncode != 0
    tried = int(done.stdout or 0) + failed
    harmed = (done.stderr[-2000:],) if failed else ()
    row = f"ASan + UBSan, kernels, {name}" + (", SIMD" if flags else "")
    survived(AttackOutcome(row, tried, tried - failed, harmed, "parameters, rules and samples"))
    assert tried > 100
