"""The supervisor's part of metering stays light: no torch, no numpy, no rich."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

MODULES = ("meter", "metrics", "report", "sources.registry", "sources.power_models", "ledger")


def test_imports_of_the_core() -> None:
    script = f"import sys\nfor m in {MODULES!r}: __import__('port_agent.energy.' + m)\n"
    script += "print([m for m in ('torch', 'numpy', 'rich', 'plotext') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
