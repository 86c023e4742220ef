"""A device on a new card: the same to all others, or refused."""

import os
from pathlib import Path

import pytest

from port_agent.federate.privacy import PRIVACY_FOLDER, PrivacyLedger
from port_agent.peers.fleet.paired import PairedDevices
from port_agent.peers.identity import backup as backup_module
from port_agent.peers.identity.backup import restore_backup, write_backup
from port_agent.peers.identity.keys import IdentityError, read_identity
from tests.agent.peers.devices import as_paired, identity


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    identity(tmp_path / "old")
    PairedDevices(tmp_path / "old").add(as_paired(identity(tmp_path / "cellar"), "cellar"))
    write_backup(tmp_path / "old", tmp_path / "backup")
    return tmp_path / "backup"


def test_a_new_card_is_the_same_device_and_trusts_the_same(tmp_path: Path, backup: Path) -> None:
    assert backup.stat().st_mode & 0o777 == 0o600
    for _ in range(2):  # again: what was cut is done again
        own, count = restore_backup(backup, tmp_path / "new")
        assert (own.id, count) == (read_identity(tmp_path / "old/identity.pem").id, 1)
    known = PairedDevices(tmp_path / "new")
    known.load()
    assert [device.name for device in known.all()] == ["cellar"] and known.damaged == ()
    assert (tmp_path / "new/identity.pem").stat().st_mode & 0o777 == 0o600


def test_what_was_spent_and_who_is_refused_come_along(tmp_path: Path) -> None:
    assert backup_module._PRIVACY_FOLDER == PRIVACY_FOLDER
    identity(tmp_path / "old")
    known, shed = PairedDevices(tmp_path / "old"), as_paired(identity(tmp_path / "shed"), "shed")
    known.add(shed)
    known.refuse(shed.id)
    PrivacyLedger(tmp_path / "old", "ab").spend(2.0, "one")
    assert write_backup(tmp_path / "old", tmp_path / "backup")[1] == 0
    restore_backup(tmp_path / "backup", tmp_path / "new")
    ledger = PrivacyLedger(tmp_path / "new", "ab")
    assert ledger.spent().rounds == 1 and PairedDevices(tmp_path / "new").is_refused(shed.id)
    ledger.spend(2.0, "two")
    restore_backup(tmp_path / "backup", tmp_path / "new")
    assert ledger.spent().rounds == 2, "nothing that was spent is taken back"


def test_whom_the_owner_unpaired_since_the_backup_stays_unpaired(tmp_path: Path, backup: Path) -> None:
    restore_backup(backup, tmp_path / "new")
    known = PairedDevices(tmp_path / "new")
    known.load()
    (cellar,) = known.all()
    known.refuse(cellar.id)
    restore_backup(backup, tmp_path / "new")
    known.load()
    assert known.all() == () and known.is_refused(cellar.id)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_restores_belongs_to_the_agents_user(tmp_path: Path, backup: Path) -> None:
    (tmp_path / "new").mkdir()
    os.chown(tmp_path / "new", 12345, 12345)
    restore_backup(backup, tmp_path / "new")
    made = list((tmp_path / "new").rglob("*"))
    assert len(made) == 3 and {path.stat().st_uid for path in made} == {12345}


def test_no_flipped_bit_and_no_other_identity_is_taken(tmp_path: Path, backup: Path) -> None:
    content = bytearray(backup.read_bytes())
    for at in range(0, len(content), 37):
        damaged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(IdentityError, match="is damaged"):
            restore_backup(tmp_path / "damaged", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    other = identity(tmp_path / "other")
    with pytest.raises(IdentityError, match=f"another identity .{other.id.group}."):
        restore_backup(backup, tmp_path / "other")
    assert read_identity(tmp_path / "other/identity.pem") == other
