"""Where the trained weights go: refused before training where they cannot, and whole or not there after it."""

import errno
import os
from pathlib import Path

import pytest

from port_agent.system.checksum import bytes_checksum
from port_agent.training.result import ResultError, ResultPlaceError, check_result, trained_bytes
from port_planner.ir.bundle.bundle import Bundle
from tests.agent.jobs_small import small_bundle
from tests.agent.training.trained_job import trainer


def test_a_place_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    bundle = Bundle(small_bundle())
    check_result(bundle, tmp_path / "w.safetensors")
    for place, said in ((tmp_path / "no/w", "no directory"), (tmp_path, "is a directory")):
        with pytest.raises(ResultPlaceError, match=said) as caught:
            check_result(bundle, place)
        assert caught.value.exit_code == 2


def test_too_little_room_is_said_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle(small_bundle())
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": trained_bytes(bundle) - 1})())
    with pytest.raises(ResultError, match="KiB free; free some space"):
        check_result(bundle, tmp_path / "w.safetensors")


def test_a_disk_that_fills_up_leaves_nothing_beside_the_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tmp_path / "state")
    t.start()
    out = tmp_path / "out"
    out.mkdir()
    checksum = t.save_weights(out / "w.safetensors")
    before = (out / "w.safetensors").read_bytes()
    assert checksum == bytes_checksum(before) and 0 < len(before) - trained_bytes(t.bundle) < 4096

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ResultError, match=r"w.safetensors: No space .* the trained state is safe"):
        t.save_weights(out / "w.safetensors")
    t.close()
    assert [path.name for path in out.iterdir()] == ["w.safetensors"]
    assert (out / "w.safetensors").read_bytes() == before
