"""Revised plans lie beside their bundle: read back as written, for no other bundle, and never believed when damaged."""

from pathlib import Path

import pytest

from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import BundleError
from port_planner.ir.bundle.revision import (
    MAX_REVISION_BYTES,
    Revision,
    read_revised_choices,
    read_revision,
    revised,
    revision_path,
    write_revision,
)
from port_planner.ir.costs import Speeds
from tests.agent.jobs_small import small_bundle


def own_plans(bundle: Bundle, bundle_id: str | None = None) -> Revision:
    return Revision(bundle_id or bundle.id, Speeds(2.0, 3e6), bundle.manifest.plans, bundle.plans, bundle.costs)


def test_a_revision_is_read_as_it_was_written(tmp_path: Path) -> None:
    bundle = Bundle(small_bundle())
    path = revision_path(tmp_path / "job.port")
    write_revision(path, own_plans(bundle))
    assert [p.name for p in tmp_path.iterdir()] == ["job.port.plans"]
    assert read_revision(path) == own_plans(bundle)
    assert read_revised_choices(path) == (bundle.manifest.plans, Speeds(2.0, 3e6))
    again = revised(bundle, read_revision(path))
    assert (again.id, again.plans, again.costs) == (bundle.id, bundle.plans, bundle.costs)
    assert again is not bundle


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    write_revision(path, own_plans(Bundle(small_bundle())))
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 200)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(BundleError, match="damaged"):
            read_revision(path)
    path.write_bytes(content[:-1])
    with pytest.raises(BundleError, match="damaged"):
        read_revised_choices(path)


def test_plans_of_another_bundle_are_refused(tmp_path: Path) -> None:
    bundle = Bundle(small_bundle())
    with pytest.raises(BundleError, match="another bundle"):
        revised(bundle, own_plans(bundle, "other"))
    with pytest.raises(BundleError, match="another bundle"):
        revised(bundle, Revision(bundle.id, Speeds(), (), [], {}))
    other = Bundle(small_bundle(2))
    with pytest.raises(BundleError, match="different graphs"):
        revised(bundle, Revision(bundle.id, Speeds(), bundle.manifest.plans, other.plans[:2], other.costs))


def test_a_file_of_any_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    with path.open("wb") as stream:
        stream.truncate(MAX_REVISION_BYTES + 1)
    with pytest.raises(BundleError, match="the maximum"):
        read_revision(path)
    with pytest.raises(FileNotFoundError):
        read_revision(tmp_path / "none")


def test_revised_plans_lie_beside_their_bundle() -> None:
    assert revision_path(Path("/jobs/1/bundle.port")) == Path("/jobs/1/bundle.port.plans")
