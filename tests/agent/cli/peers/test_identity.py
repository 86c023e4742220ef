"""`port-agent peer identity`: to a file and back, and never under an agent that runs."""

from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.system.locks import LOCK_NAME, LockFile
from tests.agent.peers.devices import identity


def test_exported_and_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = identity(tmp_path / "old")
    new, file = tmp_path / "new", str(tmp_path / "backup")
    assert main(["identity", "export", file, "--state-dir", str(own.file.parent)]) == 0
    new.mkdir()
    lock = LockFile(new / LOCK_NAME)
    assert lock.try_lock() and main(["identity", "import", file, "--state-dir", str(new)]) == 2
    assert "an agent is running with" in capsys.readouterr().err and not (new / "identity.pem").exists()
    lock.close()
    assert main(["identity", "import", file, "--state-dir", str(new)]) == 0
    assert f"This device is {own.id} now, and trusts 0 paired devices" in capsys.readouterr().out


def test_there_is_none_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity", "export", str(tmp_path / "backup"), "--state-dir", str(tmp_path)]) == 2
    assert "identity.pem: no such file; `port-agent peer pair` creates" in capsys.readouterr().err
