"""Generated C: a small golden file, the same bytes every time, strict warnings, a hash of everything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from port_planner.mcu import LayerUpdate, SparseScheme, compile_model, firmware_root
from port_planner.mcu.compile import CompiledModel
from tests.planner.mcu.networks import NETWORKS

GOLDEN = Path(__file__).parent / "golden"


def tiny() -> CompiledModel:
    """One convolution and a head with round weights: small enough to read the generated file."""
    module = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    data = np.linspace(0, 1, 27, dtype=np.float32).reshape(3, 1, 3, 3)
    scheme = SparseScheme({"0": LayerUpdate(True, 1), "3": LayerUpdate(True, 2)})
    return compile_model(module.eval(), data, name="tiny", scheme=scheme, q88=True)


@pytest.mark.process
@pytest.mark.parametrize("name", ["model.h", "model.c"])
def test_the_generated_files_are_golden(tmp_path: Path, name: str) -> None:
    tiny().write(tmp_path)
    assert (tmp_path / name).read_text() == (GOLDEN / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("network", list(NETWORKS))
def test_the_same_model_generates_the_same_bytes(network: str) -> None:
    first, second = (compile_model(*NETWORKS[network]()) for _ in range(2))
    assert first.generated == second.generated
    assert first.generated.source.isascii()


def test_the_hash_covers_weights_and_scheme() -> None:
    module, data = NETWORKS["stream"]()
    plain = compile_model(module, data)
    sparse = compile_model(module, data, scheme=SparseScheme({"head": LayerUpdate(True, 3)}))
    with torch.no_grad():
        module.get_parameter("head.weight")[0, 0] += 1
    hashes = {plain.sha256, sparse.sha256, compile_model(module, data).sha256}
    assert len(hashes) == 3
    assert all(f"0x{byte:02x}" in plain.generated.source for byte in plain.sha256)


@pytest.mark.process
@pytest.mark.parametrize("network", list(NETWORKS))
def test_tables_and_kernels_compile_without_warnings(tmp_path: Path, network: str) -> None:
    compile_model(*NETWORKS[network](), q88=True).write(tmp_path)
    root = firmware_root()
    sources = [tmp_path / "model.c", *sorted((root / "engine").glob("*.c")), *sorted((root / "kernels").glob("*.c"))]
    for extra in ([], ["-DPORT_SIMD_EMULATE"]):
        command = [
            "cc",
            "-std=c99",
            "-pedantic",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wshadow",
            *extra,
            "-fsyntax-only",
            f"-I{root / 'include'}",
            f"-I{tmp_path}",
            *map(str, sources),
        ]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr


@pytest.mark.process
def test_the_engine_keeps_no_state_and_allocates_nothing(tmp_path: Path) -> None:
    """No writable data in any object and no call into the heap or libm: asked of the object files, not of the text."""
    root = firmware_root()
    for source in [*(root / "engine").glob("*.c"), *(root / "kernels").glob("*.c")]:
        target = tmp_path / f"{source.stem}.o"
        flags = ["-std=c99", "-O2", "-ffp-contract=off", "-fno-pic", f"-I{root / 'include'}"]
        subprocess.run(["cc", *flags, "-c", str(source), "-o", str(target)], check=True)
        symbols = subprocess.run(["nm", str(target)], capture_output=True, text=True, check=True).stdout.split("\n")
        kinds = {line.split()[-2] for line in symbols if line.strip()}
        assert not kinds & set("BbDdCc"), source.name
        undefined = {line.split()[-1] for line in symbols if " U " in line}
        assert all(
            name.startswith("port_") or name in {"memcpy", "memset", "__stack_chk_fail"} for name in undefined
        ), undefined
