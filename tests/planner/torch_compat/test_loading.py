"""What torch is kept from importing, and the marks of what its compiler leaves alone, compared with the real ones."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from port_planner.torch_compat.loading import (
    CALLBACK,
    compiler_frames,
    compiler_of,
    compiling_disabled,
    forget_disabled,
    mark_disabled,
)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_torch_is_imported_without_kernels_for_the_meta_device_and_has_them_later() -> None:
    assert (
        run(
            "import sys, warnings\n"
            "from port_planner.torch_compat.loading import without_meta_kernels\n"
            "with without_meta_kernels():\n"
            "    import torch\n"
            "gone = 'torch._meta_registrations' not in sys.modules\n"
            "import torch._meta_registrations as later\n"
            "print(gone, hasattr(later, 'meta_mm'), torch.Generator().initial_seed() > 0)"
        )
        == "True True True"
    )


def test_the_marks_are_those_of_the_real_compiler() -> None:
    from torch import _disable_dynamo, _dynamo

    def function() -> int:
        return 3

    def call() -> int:
        return function()

    real = vars(_dynamo.disable(function, reason="why"))
    mark_disabled(call, function, "why", recursive=True)
    assert {n for n in real if n.startswith("_torchdynamo")} == vars(call).keys()
    of_calls = {"_torchdynamo_wrapper_id"}
    assert all(real[name] == value for name, value in vars(call).items() if name not in of_calls)
    assert _disable_dynamo(function)() == 3
    assert "__dynamo_disable" in vars(function), "torch keeps elsewhere what `disable` returned"
    setattr(function, "__dynamo_disable", function)  # as where the real module was not there yet
    forget_disabled(function)
    assert "__dynamo_disable" not in vars(function)


def test_the_compiler_has_what_programs_are_refused_by() -> None:
    import torch._dynamo

    frames = compiler_frames()
    assert frames is not None and hasattr(frames, CALLBACK) and hasattr(frames, "OptimizedModule")
    assert compiling_disabled() is torch._dynamo.config.disable


def test_a_backend_is_named_as_it_was_asked_for() -> None:
    inner = SimpleNamespace(compiler_name="aot_eager")
    assert compiler_of(SimpleNamespace(_torchdynamo_orig_backend=inner)) == "aot_eager"


@pytest.mark.process
def test_what_is_marked_is_not_compiled() -> None:
    out = run(
        "import torch\n"
        "from port_planner.torch_compat.loading import never_compile\n"
        "def marked(x):\n"
        "    seen.append(torch.compiler.is_compiling())\n"
        "    return x + 1\n"
        "seen = []\n"
        "never_compile(marked)\n"
        "print(torch.compile(marked, backend='eager')(torch.ones(1)).item(), seen)"
    )
    assert out == "2.0 [False]"
