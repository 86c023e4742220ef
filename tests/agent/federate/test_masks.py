"""Masks of secure aggregation: of all bits of a secret, and by the cipher itself; Flower draws no others."""

import hashlib
import importlib
import struct
import types

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tests.agent.federate.jobs import needs_flower

pytest.importorskip("flwr")

import port_agent.federate.masked_average
import port_agent.federate.masking  # noqa: F401
from port_agent.federate.masks import SUMMED_MODULUS, draw_masks_here, masks

pytestmark = needs_flower

masking_of_devices = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
masking_of_leaders = importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")


def test_a_mask_is_of_all_bits_of_its_secret_and_of_nothing_else() -> None:
    """Flower folds a secret into 32 bits: to it, the first two were the same, and 2^32 tries find any."""
    secret = bytes(range(32))
    folded_alike = secret[4:8] + secret[:4] + secret[8:]
    assert masking_of_devices.pseudo_rand_gen is masking_of_leaders.pseudo_rand_gen is masks
    (mask,), (again,), (other,) = (masks(one, SUMMED_MODULUS, [(50, 40)]) for one in (secret, secret, folded_alike))
    assert np.array_equal(mask, again) and (mask == other).sum() < 3
    assert mask.dtype == np.int64 and mask.min() >= 0 and 2**31 < mask.max() < SUMMED_MODULUS
    for bit in range(256):
        flipped = (int.from_bytes(secret, "big") ^ 1 << bit).to_bytes(32, "big")
        assert (masks(flipped, SUMMED_MODULUS, [(50, 40)])[0] == mask).sum() < 3
    shapes = [(1,), (), (0, 3), (2, 2)]
    drawn = masks(secret, SUMMED_MODULUS, shapes)
    assert [array.shape for array in drawn] == shapes
    assert [*np.concatenate([array.ravel() for array in drawn])] == [*mask.ravel()[:6]]
    with pytest.raises(ValueError, match="not 4096"):
        masks(secret, 1 << 12, shapes)
    with pytest.raises(ImportError, match="this version of Flower is not supported"):
        draw_masks_here(types.ModuleType("flwr.elsewhere"))


def test_masks_are_the_key_stream_of_aes(known: bytes = b"secret") -> None:
    """By the block cipher itself, so that devices of this version and of later ones agree."""
    key = hashlib.sha256(b"port-agent: masks of a sum" + known).digest()
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    stream = b"".join(block.update(number.to_bytes(16, "big")) for number in range(3))
    (drawn,) = masks(known, SUMMED_MODULUS, [(12,)])
    assert [*drawn] == [*struct.unpack("<12I", stream)]
