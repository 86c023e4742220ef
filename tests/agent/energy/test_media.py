"""What a medium is, what it endures and what a written byte costs of it."""

import os
from pathlib import Path

import pytest

from port_agent.energy.media import FlashPrices, medium_of, medium_under, used_life
from port_planner.ir.costs import MediumKind

ASSUMED = FlashPrices()
GB = 10**9


def test_a_written_byte_of_a_card_costs_thousands_of_transfers() -> None:
    card = medium_of(MediumKind.SD, ASSUMED)
    assert (card.endurance_bytes, card.assumed) == (600 * 32 * GB, True)
    dollars_per_tb = card.wear_joules_per_byte * 1e12 / 3.6e6 * 0.30
    assert dollars_per_tb == pytest.approx(0.42, rel=0.01)


def test_the_owner_knows_better() -> None:
    card = medium_of(MediumKind.SD, FlashPrices(endurance_bytes=20 * 10**12, medium=8.0, per_kwh=0.30))
    assert (card.endurance_bytes, card.assumed) == (20 * 10**12, False)
    assert card.wear_joules_per_byte == pytest.approx(4.8e-6)
    assert medium_of(MediumKind.SD, FlashPrices(medium=0.0)).wear_joules_per_byte == 0


def test_wear_per_byte_does_not_depend_on_an_assumed_size() -> None:
    small, large = (medium_of(MediumKind.SSD, ASSUMED, size * GB) for size in (128, 1000))
    assert small.wear_joules_per_byte == pytest.approx(large.wear_joules_per_byte)
    assert small.endurance_bytes == 128 * 600 * GB


def test_disks_that_turn_do_not_wear() -> None:
    disk = medium_of(MediumKind.DISK, FlashPrices(endurance_bytes=10**12, medium=50.0))
    assert (disk.endurance_bytes, disk.wear_joules_per_byte) == (None, 0)


@pytest.mark.parametrize(
    ("device", "files", "kind"),
    [
        ("mmc0/mmc0:aaaa/block/mmcblk0", {"device/type": "SD\n"}, MediumKind.SD),
        ("mmc0/mmc0:0001/block/mmcblk0", {"device/type": "MMC\n"}, MediumKind.EMMC),
        ("pci0000:00/nvme/nvme0/nvme0n1", {"queue/rotational": "0\n"}, MediumKind.SSD),
        ("pci0000:00/usb2/2-1/host0/block/sda", {"queue/rotational": "0\n"}, MediumKind.USB),
        ("pci0000:00/ata1/host0/block/sda", {"queue/rotational": "1\n"}, MediumKind.DISK),
        ("virtual/block/zram0", {"queue/rotational": "0\n"}, MediumKind.ZRAM),
    ],
)
def test_what_the_kernel_tells(tmp_path: Path, device: str, files: dict[str, str], kind: MediumKind) -> None:
    disk = add_disk(tmp_path, device, files)
    name_disk(tmp_path, disk)
    medium = medium_under(tmp_path, ASSUMED, tmp_path)
    assert medium.kind is kind
    assert medium.endurance_bytes == (None if kind in (MediumKind.DISK, MediumKind.ZRAM) else 64 * 10**9 * 600)


def test_the_disk_below_an_encrypted_volume(tmp_path: Path) -> None:
    disk = add_disk(tmp_path, "mmc0/block/mmcblk0", {"device/type": "SD\n"})
    partition = disk / "mmcblk0p2"
    partition.mkdir()
    (partition / "partition").write_text("2\n")
    volume = add_disk(tmp_path, "virtual/block/dm-0", {"queue/rotational": "0\n"})
    (volume / "slaves").mkdir()
    (volume / "slaves/mmcblk0p2").symlink_to(partition)
    name_disk(tmp_path, volume)
    assert medium_under(tmp_path, ASSUMED, tmp_path).kind is MediumKind.SD


def test_where_the_kernel_says_nothing_it_is_taken_for_a_card(tmp_path: Path) -> None:
    assert medium_under(tmp_path, ASSUMED, tmp_path) == medium_of(MediumKind.SD, ASSUMED)


@pytest.mark.parametrize(("text", "used"), [("0x02 0x01\n", 0.2), ("0x00 0x0b\n", 1.0), ("0x00 0x00\n", None)])
def test_an_emmc_says_what_it_has_used(tmp_path: Path, text: str, used: float | None) -> None:
    files = {"device/type": "MMC\n", "device/life_time": text}
    name_disk(tmp_path, add_disk(tmp_path, "mmc0/mmc0:0001/block/mmcblk0", files))
    assert used_life(tmp_path, tmp_path) == used


def test_a_card_and_an_nvme_do_not_say(tmp_path: Path) -> None:
    assert used_life(tmp_path, tmp_path) is None
    name_disk(tmp_path, add_disk(tmp_path, "pci0000:00/nvme/nvme0/nvme0n1", {"queue/rotational": "0\n"}))
    assert used_life(tmp_path, tmp_path) is None


def add_disk(root: Path, device: str, files: dict[str, str]) -> Path:
    """Write the sysfs folder of a disk of 64 GB."""
    disk = root / "sys/devices" / device
    for name, text in {**files, "size": f"{64 * 10**9 // 512}\n"}.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text(text)
    return disk


def name_disk(root: Path, disk: Path) -> None:
    """Make `disk` what holds `root`."""
    number = root.stat().st_dev
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk)
