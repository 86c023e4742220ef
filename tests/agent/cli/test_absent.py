"""What the agent does without."""

import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.cli.absent import absent


def test_a_module_is_absent_in_the_block_alone() -> None:
    sys.modules.pop("this", None)
    with absent("this", "sys"):
        with pytest.raises(ImportError):
            __import__("this")
        assert __import__("sys") is sys, "what is loaded stays"
    assert "this" not in sys.modules


@pytest.mark.process
def test_the_agents_command_leaves_nothing_loaded_that_only_the_command_line_needs(tmp_path: Path) -> None:
    unused = ("_bz2", "_lzma", "random", "tempfile", "typing_extensions")
    program = (
        "import asyncio, sys\n"
        f"asyncio.run = lambda work: (work.close(), print(*[name for name in {unused!r} if sys.modules.get(name)]))\n"
        "from port_agent.cli import main\n"
        "main(['run', '--state-dir', 'state', '--runtime-dir', 'run'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
