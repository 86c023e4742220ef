"""The file that a bundle grows in."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from port_agent.prepare.measurement.dry_run import DryRun
from port_planner.ir.bundle import writer
from port_planner.ir.bundle.bundle import TENSOR_MEMBERS, Bundle
from port_planner.ir.bundle.safetensors_io import Chunks
from tests.agent.prepare.making.small_bundles import MIB, fake_trials, shallow, small_made
from tests.planner.bundles import read_everything


def test_weights_and_data_are_written_once_whatever_the_trials_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unplanned = iter([8 * MIB, 4 * MIB, 2 * MIB, 0])
    tried: list[int] = []
    written: list[str] = []
    write_tensors = writer._write_tensors

    def counted(archive: zipfile.ZipFile, name: str, tensors: Mapping[str, Chunks]) -> dict[str, str]:
        written.append(name)
        return write_tensors(archive, name, tensors)

    def dry_run(bundle_file: Path, *_: object, **__: object) -> DryRun:
        planned = Bundle(bundle_file).manifest.plans[0].peak_bytes
        tried.append(planned)
        return DryRun(planned + next(unplanned))

    monkeypatch.setattr(writer, "_write_tensors", counted)
    fake_trials(monkeypatch, dry_run)
    path = tmp_path / "job.port"
    small_made(path, shallow(), 64 * MIB)
    assert len(tried) == 4 and tried == sorted(tried)
    assert sorted(written) == sorted(TENSOR_MEMBERS), "each member once"
    read_everything(Bundle(path))
    assert [p.name for p in tmp_path.iterdir()] == ["job.port"]
