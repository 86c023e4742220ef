"""The table of steps whole and in tiles: two rows a share, the floor never higher."""

from pathlib import Path

import pytest

from benchmarks.variants import compare_variants, variants_table


@pytest.mark.long
def test_a_share_has_both_rows_and_the_floor_does_not_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole, cut = compare_variants("resnet18", [50], tmp_path, small=True, strategy="greedy")
    assert (whole.tiles, whole.percent) == ("whole", 50) and cut.tiles != "whole"
    assert cut.floor_bytes <= whole.floor_bytes
    assert whole.seconds is not None and cut.seconds is not None
    assert whole.overhead_joules is not None and cut.overhead_joules is not None
    assert cut.overhead_joules <= whole.overhead_joules
    assert variants_table([whole, cut]).row_count == 2
