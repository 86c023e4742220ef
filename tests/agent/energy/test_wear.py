"""Flash wear: sectors to bytes, disks of partitions, eMMC life, outlook."""

from pathlib import Path

import pytest

from port_agent.energy.sources.power_source import SourceError
from port_agent.energy.wear import DiskCounter, block_device_of, outlook, parse_life_time, parse_written_bytes
from tests.agent.energy.device_trees import STAT, disk


def test_sectors_are_512_bytes() -> None:
    assert parse_written_bytes(STAT) == 432176 * 512


@pytest.mark.parametrize("text", ["", "1 2 3", STAT.replace("432176", "43x176"), STAT[:50]])
def test_garbled_statistics(text: str) -> None:
    with pytest.raises(SourceError):
        parse_written_bytes(text)


@pytest.mark.parametrize("partition", [True, False])
def test_counts_the_whole_disk_of_a_partition(tmp_path: Path, partition: bool) -> None:
    real = disk(tmp_path, tmp_path, partition)
    counter = DiskCounter(tmp_path, tmp_path)
    assert counter.name == "mmcblk0"
    assert counter.written_since_last() is None
    (real / "stat").write_text(STAT.replace("432176", "432276"))
    assert counter.written_since_last() == 51200
    (real / "stat").write_text(STAT)
    assert counter.written_since_last() is None, "a counter that fell was reset"


def test_folder_without_a_disk(tmp_path: Path) -> None:
    assert block_device_of(tmp_path, tmp_path) is None
    counter = DiskCounter(tmp_path, tmp_path)
    assert (counter.name, counter.written_since_last(), counter.used_life()) == ("", None, None)


def test_emmc_life(tmp_path: Path) -> None:
    real = disk(tmp_path, tmp_path)
    (real / "device").mkdir()
    (real / "device/life_time").write_text("0x02 0x01\n")
    assert DiskCounter(tmp_path, tmp_path).used_life() == pytest.approx(0.2)
    assert parse_life_time("0x00 0x00") is None
    assert parse_life_time("0x0b 0x01") == 1.0
    for text in ("", "0x0c 0x01", "two"):
        with pytest.raises(SourceError):
            parse_life_time(text)


def test_outlook_in_years() -> None:
    view = outlook(10 * 10**9, 10.0, 36_525 * 10**9)
    assert (view.bytes_per_day, view.years_left) == (1e9, pytest.approx(100.0))
    assert outlook(10**9, 1.0, 365_250 * 10**6, used_fraction=0.5).years_left == pytest.approx(0.5)
    assert outlook(0, 3.0, 10**12).years_left is None
    assert outlook(10**9, 1.0, None).years_left is None
    guess = outlook(32 * 10**9, 1.0, None, size_bytes=32 * 10**9)
    assert (guess.assumed, guess.endurance_bytes, guess.years_left) == (
        True,
        32 * 600 * 10**9,
        pytest.approx(600 / 365.25),
    )
    assert not outlook(10**9, 1.0, 10**12, size_bytes=32 * 10**9).assumed


def test_size_counts_only_for_flash(tmp_path: Path) -> None:
    real = disk(tmp_path, tmp_path)
    assert DiskCounter(tmp_path, tmp_path).flash_bytes() is None
    (real / "queue").mkdir()
    (real / "size").write_text("62333952\n")
    (real / "queue/rotational").write_text("0\n")
    assert DiskCounter(tmp_path, tmp_path).flash_bytes() == 62333952 * 512
    (real / "queue/rotational").write_text("1\n")
    assert DiskCounter(tmp_path, tmp_path).flash_bytes() is None
    (real / "queue/rotational").write_text("maybe\n")
    with pytest.raises(SourceError, match="maybe"):
        DiskCounter(tmp_path, tmp_path).flash_bytes()
