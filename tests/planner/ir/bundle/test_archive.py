"""Archives from strangers: members are found by their names alone, bounded, and what the manifest has hashes of."""

import json
import struct
import zipfile
from pathlib import Path

import pytest

from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import BundleError
from tests.agent.jobs_small import small_bundle
from tests.planner.bundles import assemble, load, members, read_everything


@pytest.mark.slow
def test_members_that_nobody_asked_for_do_nothing(tmp_path: Path) -> None:
    """A pickle and names that climb out of the directory are never opened or unpacked."""
    content = members(small_bundle())
    marker = tmp_path / "owned"
    content["graphs.pkl"] = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    content["../../escaped"] = b"x"
    content["/tmp/port-absolute"] = b"x"
    before = set(tmp_path.parent.rglob("*"))
    path = tmp_path / "x.port"
    assemble(path, content)
    read_everything(load(path))
    assert not marker.exists() and not Path("/tmp/port-absolute").exists()
    assert set(tmp_path.parent.rglob("*")) - before <= {path}


def test_pickle_in_place_of_a_graph(tmp_path: Path) -> None:
    content = members(small_bundle())
    marker = tmp_path / "owned"
    content["graphs.msgpack"] = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    assemble(tmp_path / "x.port", content)
    with pytest.raises(PortError):
        load(tmp_path / "x.port")
    assert not marker.exists()


def test_compressed_or_short_or_overlong_tensors(tmp_path: Path) -> None:
    content = members(small_bundle())
    path = tmp_path / "x.port"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    with pytest.raises(BundleError, match="compressed"):
        load(path)
    for header in (
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 10) + b"not json!!",
        b"abc",
        struct.pack("<Q", 2) + b"[]",
    ):
        assemble(path, {**content, "tensors.safetensors": header})
        with pytest.raises(BundleError):
            load(path)
    for entry in (
        '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99999999]}}',
        '{"a": 5}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        "[" * 100_000,
    ):
        data = entry.encode()
        assemble(path, {**content, "tensors.safetensors": struct.pack("<Q", len(data)) + data})
        with pytest.raises(BundleError):
            load(path)


@pytest.mark.slow
def test_a_zip_bomb(tmp_path: Path) -> None:
    content = members(small_bundle())
    content["graphs.msgpack"] = b"\0" * (80 << 20)
    assemble(tmp_path / "x.port", content)
    with pytest.raises(BundleError, match="limit"):
        load(tmp_path / "x.port")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.3, 0.9, -1])
def test_truncated_files(keep: float, tmp_path: Path) -> None:
    data = small_bundle().read_bytes()
    path = tmp_path / "x.port"
    path.write_bytes(data[: int(keep * len(data))] if 0 < keep < 1 else data[: int(keep)])
    with pytest.raises(BundleError):
        load(path)


def test_a_bundle_without_checksums_is_to_be_planned_again(tmp_path: Path) -> None:
    content = members(small_bundle())
    content["manifest.json"] = json.dumps({**json.loads(content["manifest.json"]), "format": 1}).encode()
    assemble(tmp_path / "old.port", content)
    with pytest.raises(BundleError, match=r"format 1, this version reads 2.*plan the job again"):
        Bundle(tmp_path / "old.port")
