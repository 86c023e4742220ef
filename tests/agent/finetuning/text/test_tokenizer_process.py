"""The process that has the tokenizer loads neither torch nor what needs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.finetuning.tiny_model import make_data, make_model

pytestmark = pytest.mark.process

_PROGRAM = """
import io, pickle, sys
from types import SimpleNamespace
import msgspec
from port_agent.finetuning.inputs.options import FinetuneOptions
from pathlib import Path
from port_agent.finetuning.text import tokenizer_process
from port_agent.finetuning.text.sequence_file import SequenceFile
options = FinetuneOptions(sys.argv[1], (sys.argv[2],), "", sequence_tokens=32)
out = io.BytesIO()
sys.argv[1:] = [msgspec.json.encode(options).decode(), "tokenized"]
file = SequenceFile.beside(Path(sys.argv[0]))
sys.stdin, sys.stdout = SimpleNamespace(buffer=io.BytesIO(pickle.dumps((file,)))), SimpleNamespace(buffer=out)
tokenizer_process.main()
sys.stdout = sys.__stdout__
assert pickle.loads(out.getvalue()).split.train
sys.exit("torch" in sys.modules or "peft" in sys.modules)
"""


def test_it_has_no_torch(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(model), str(data)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
