"""Which devices are trusted: what the files say, and no more than their hashes prove."""

import base64
import json
from pathlib import Path

import pytest

from port_agent.peers.connection.tls import TlsError
from port_agent.peers.fleet import paired
from port_agent.peers.fleet.paired import FOLDER, PairedDeviceError, PairedDevices, device_of
from tests.agent.peers.devices import PAIRED_AT, as_paired, identity


def devices(root: Path) -> PairedDevices:
    known = PairedDevices(root)
    known.load()
    return known


def test_kept_over_a_restart_until_removed(tmp_path: Path) -> None:
    known = devices(tmp_path)
    assert known.all() == () and not (tmp_path / FOLDER).exists()
    one, two = (as_paired(identity(tmp_path / name), name, ("10.0.0.2", 9478)) for name in ("one", "two"))
    known.add(two)
    known.add(one)
    assert devices(tmp_path).all() == (one, two) and devices(tmp_path).get(two.id) == two
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    known.remove(one.id)
    assert devices(tmp_path).all() == known.all() == (two,) and known.get(one.id) is None
    known.remove(one.id)


def test_how_and_where_a_device_was_met_is_kept(tmp_path: Path) -> None:
    known, device = devices(tmp_path), as_paired(identity(tmp_path / "one"), "one")
    known.add(device)
    known.met(device.id, "attic", ("fe80::1%eth0", 9478))
    (now,) = devices(tmp_path).all()
    assert (now.name, now.address) == ("attic", ("fe80::1%eth0", 9478))
    written = (tmp_path / FOLDER / f"{device.id}.json").stat().st_mtime_ns
    known.met(device.id, "", None)
    assert (tmp_path / FOLDER / f"{device.id}.json").stat().st_mtime_ns == written, "nothing new, no write"


def test_a_rename_is_told_and_takes_no_name_of_another(tmp_path: Path) -> None:
    known = devices(tmp_path)
    one, two = (as_paired(identity(tmp_path / name), "attic") for name in ("one", "two"))
    assert known.add(one).name == "attic" and known.add(two).name == f"attic-{two.id.group}"
    assert known.met(one.id, "attic", ("10.0.0.2", 9478)) is None
    assert known.met(one.id, "\u202ecellar", None) == ("attic", "cellar")
    assert known.met(two.id, "cellar", None) == (f"attic-{two.id.group}", f"cellar-{two.id.group}")
    assert known.met(two.id, "b\u00fcro", None) == (f"cellar-{two.id.group}", "b\u00fcro")


@pytest.mark.parametrize("name", ["Attic", "\u0430ttic", "att\u00eec", "this device", "This Devi\u0441e"])
def test_a_name_that_looks_like_another_is_told_apart_by_its_id(tmp_path: Path, name: str) -> None:
    known = devices(tmp_path)
    one, two = (as_paired(identity(tmp_path / folder), called) for folder, called in (("one", "attic"), ("two", name)))
    assert known.add(one).name == "attic" and known.add(two).name == f"{name}-{two.id.group}"
    assert known.met(one.id, "attic", None) is None, "who had a name first keeps it"


def test_one_file_without_a_certificate_takes_nobody_down(tmp_path: Path) -> None:
    known, one = devices(tmp_path), as_paired(identity(tmp_path / "one"), "one")
    known.add(one)
    evil = device_of(b"0\x03abc", "evil", PAIRED_AT, None)
    with pytest.raises(TlsError, match="5 bytes that are not a certificate"):
        known.add(evil)
    record = {"certificate": base64.b64encode(evil.certificate).decode(), "name": "evil", "paired_at": 0.0}
    (tmp_path / FOLDER / f"{evil.id}.json").write_text(json.dumps(record))
    assert (devices(tmp_path).all(), devices(tmp_path).damaged) == ((one,), (f"{evil.id}.json",))


def test_what_is_met_late_brings_no_unpaired_device_back(tmp_path: Path) -> None:
    known, device = devices(tmp_path), as_paired(identity(tmp_path / "one"), "one")
    known.add(device)
    known.remove(device.id)
    known.met(device.id, "attic", ("10.0.0.2", 9478))
    assert known.all() == devices(tmp_path).all() == ()


@pytest.mark.long
def test_no_flipped_bit_makes_another_device_trusted(tmp_path: Path) -> None:
    known, device = devices(tmp_path), as_paired(identity(tmp_path / "one"), "one", ("10.0.0.2", 9478))
    known.add(device)
    file = tmp_path / FOLDER / f"{device.id}.json"
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        found = devices(tmp_path)
        assert all(other.certificate == device.certificate for other in found.all())
        assert found.all() or found.damaged == (file.name,)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"certificate": "!", "name": "", "paired_at": 0}']
)
def test_what_is_no_record_trusts_nobody_and_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "O2JMHLJ.json").write_bytes(content)
    assert (devices(tmp_path).all(), devices(tmp_path).damaged) == ((), ("O2JMHLJ.json",))


def test_a_record_under_another_devices_name_trusts_nobody(tmp_path: Path) -> None:
    known, one, two = devices(tmp_path), *(as_paired(identity(tmp_path / name), name) for name in ("one", "two"))
    known.add(one)
    file = tmp_path / FOLDER / f"{one.id}.json"
    file.rename(file.with_name(f"{two.id}.json"))
    assert devices(tmp_path).all() == ()
    assert json.loads(file.with_name(f"{two.id}.json").read_bytes())["name"] == "one"


def test_found_by_name_id_or_its_beginning(tmp_path: Path) -> None:
    known = devices(tmp_path)
    with pytest.raises(PairedDeviceError, match="paired devices are none"):
        known.find("one")
    one, two = (as_paired(identity(tmp_path / name), name) for name in ("one", "two"))
    known.add(one)
    known.add(two)
    for text in ("one", str(one.id), one.id.group, one.id.group.lower(), str(one.id).replace("-", " ").lower()):
        assert known.find(text) == one
    for text in ("", " ", "three", str(one.id)[:-1] + "!"):
        with pytest.raises(PairedDeviceError, match=r"no paired device|several"):
            known.find(text)
    known.met(two.id, "one", None)
    assert known.find("one") == one, "a name belongs to the id that had it first"
    assert known.find(f"one-{two.id.group}").id == two.id


def test_so_many_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "MAX_PAIRED", 1)
    known = devices(tmp_path)
    one, two = (as_paired(identity(tmp_path / name), name) for name in ("one", "two"))
    known.add(one)
    known.add(one)
    with pytest.raises(PairedDeviceError, match="1 devices are paired"):
        known.add(two)


def test_a_device_without_a_name_is_called_by_its_id(tmp_path: Path) -> None:
    device = as_paired(identity(tmp_path / "one"), "\x1b\n")
    assert device.name == device.id.group
