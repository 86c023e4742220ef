"""A bundle that is submitted is read whole: what is damaged anywhere is refused then, not in the
night in which it trains.
"""

from pathlib import Path

import pytest

from port_agent.jobs.job import JobKind
from port_agent.supervisor.job import bundle_check
from port_agent.supervisor.job.worker_kinds import DEFAULT_KINDS, read_training_bundle
from port_agent.system.helper_process import HelperError, run_helper
from port_planner.ir.bundle.bundle import Bundle
from tests.agent.jobs_small import small_bundle


def flipped(folder: Path, member: str, name: str) -> Path:
    """Return a copy of the small bundle with a bit of a tensor's, or a column's, last byte changed."""
    copy, whole = folder / "copy.port", Bundle(small_bundle())
    content = bytearray(small_bundle().read_bytes())
    found = getattr(whole, member)[name]
    content[found.offset + found.nbytes - 1] ^= 4
    copy.write_bytes(content)
    return copy


@pytest.mark.parametrize(
    ("member", "name"), [("tensors", "parameter/7.weight"), ("data", "train/0"), ("data", "eval/1")]
)
def test_what_is_damaged_anywhere_is_named(
    member: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = flipped(tmp_path, member, name)
    read_training_bundle(damaged)  # which looks at the manifest alone
    assert bundle_check.main(str(damaged)) == 1
    assert name in capsys.readouterr().err


def test_a_sound_bundle_is_taken() -> None:
    assert bundle_check.main(str(small_bundle())) == 0


@pytest.mark.process
def test_a_process_of_its_own_reads_it(tmp_path: Path) -> None:
    check = DEFAULT_KINDS[JobKind.TRAIN].check
    assert check is not None and run_helper(check(small_bundle())) == b""
    with pytest.raises(HelperError, match=r"copy.port: .*train/0 is damaged near row"):
        run_helper(check(flipped(tmp_path, "data", "train/0")))
