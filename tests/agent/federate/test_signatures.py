"""Who signed what: the device that is paired, that content, and nobody else."""

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from port_agent.federate.signatures import DeviceSignatures, SignatureError
from port_agent.peers.federation_requests import node_number
from port_agent.peers.fleet.paired import PairedDevices
from tests.agent.peers.devices import as_paired, identity


def test_only_what_a_paired_device_signed_is_taken(tmp_path: Path) -> None:
    one, two = (identity(tmp_path / name) for name in ("one", "two"))
    PairedDevices(tmp_path / "one").add(as_paired(two, "two"))
    signatures, theirs = DeviceSignatures(tmp_path / "one"), DeviceSignatures(tmp_path / "two")
    node, signature = node_number(str(two.id)), theirs.sign(b"keys")
    signatures.check(node, b"keys", signature)
    for content, given in ((b"keys of another round", signature), (b"keys", signatures.sign(b"keys")), (b"keys", b"")):
        with pytest.raises(SignatureError, match="did not sign the keys"):
            signatures.check(node, content, given)
    with pytest.raises(SignatureError, match="unpaired device"):
        theirs.check(node_number(str(one.id)), b"keys", signatures.sign(b"keys"))
