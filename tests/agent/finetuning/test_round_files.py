"""Files of a round are opened where the worker has rights, and used where it has none any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.finetuning.round_files import RoundFiles, open_round
from port_agent.worker.worker_options import FinetuneWorkerOptions


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can take another user's rights")
def test_files_of_a_round_are_opened_before_rights_are_given_up(tmp_path: Path) -> None:
    roots = tmp_path / "roots"
    roots.mkdir(mode=0o700)
    (roots / "start").write_bytes(b"averaged")
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom port_agent.finetuning.job import start\n"
        "from port_agent.worker.worker_options import FinetuneWorkerOptions\n"
        "folder = Path(sys.argv[2])\n"
        "told = FinetuneWorkerOptions(\n"
        "    bundle=folder, state_dir=folder, weights=folder / 'start', out=folder / 'result.part', round=2\n"
        ")\n"
        "files = start.open_round(told)\n"
        "start._take_rights_of(sys.argv[1])\n"
        "print(os.read(files.weights, 99), os.write(files.result, b'trained'), os.get_inheritable(files.result), files.number)\n"
        "try: (folder / 'start').read_bytes()\n"
        "except PermissionError: print('refused')\n"
    )
    words = [sys.executable, "-c", program, "nobody", str(roots)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["b'averaged' 7 True 2", "refused"]
    assert (roots / "result.part").read_bytes() == b"trained" and (roots / "result.part").stat().st_uid == 0


def test_outside_a_federation_nothing_is_opened_and_without_a_round_nothing_is_made(tmp_path: Path) -> None:
    options = FinetuneWorkerOptions(bundle=tmp_path, state_dir=tmp_path, out=tmp_path / "result")
    assert open_round(options) is None
    (tmp_path / "model").write_bytes(b"averaged")
    files = open_round(
        FinetuneWorkerOptions(bundle=tmp_path, state_dir=tmp_path, weights=tmp_path / "model", out=options.out)
    )
    assert isinstance(files, RoundFiles) and (files.result, files.number) == (None, None)
    assert os.pread(files.weights, 99, 0) == b"averaged" and not (tmp_path / "result").exists()
    os.close(files.weights)
