"""What a reply in a stage of secure aggregation may contain. Flower's workflow accepts anything, and
fails with an exception later.

The stages have Flower's names. Whether masks and shares are genuine shows only in the sum (`masked_average`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Message
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat

from port_agent.federate.wire import UNREADABLE_ARRAY, FlowerMessageError

_FIELDS: Mapping[str, frozenset[str]] = {
    Stage.SETUP: frozenset({Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2}),
    Stage.SHARE_KEYS: frozenset({Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST}),
    Stage.COLLECT_MASKED_VECTORS: frozenset({Key.MASKED_PARAMETERS}),
    Stage.UNMASK: frozenset({Key.NODE_ID_LIST, Key.SHARE_LIST}),
}
_SHARE_BLOCK, _SHARE_INDEX = 16, 4
"""Sizes in bytes of a share's blocks and of its index."""


def check_stage_reply(
    asked: Message, reply: Message, shapes: Sequence[tuple[int, ...]], samples: Mapping[int, int]
) -> None:
    """Raise FlowerMessageError for a reply that does not fit the request.

    `shapes`: shapes of the masked sums. `samples`: numbers of samples that the devices reported before, by node.
    """
    node, question = asked.metadata.dst_node_id, asked.content.config_records[RECORD_KEY_CONFIGS]
    stage, answer = str(question[Key.STAGE]), reply.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    if set(answer) != _FIELDS[stage]:
        found = ", ".join(sorted(answer)) or "nothing"
        raise FlowerMessageError(f"its reply to the stage {stage} has {found}")
    if stage == Stage.SETUP:
        _check_keys([answer[Key.PUBLIC_KEY_1], answer[Key.PUBLIC_KEY_2]])
    elif stage == Stage.SHARE_KEYS:
        others = {int(name) for name in question if name != Key.STAGE} - {node}
        _check_pairs(answer[Key.DESTINATION_LIST], answer[Key.CIPHERTEXT_LIST], others)
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        _check_sums(answer[Key.MASKED_PARAMETERS], shapes)
        _check_samples(reply, samples[node])
    else:
        nodes = {*_list(question[Key.ACTIVE_NODE_ID_LIST]), *_list(question[Key.DEAD_NODE_ID_LIST])}
        _check_pairs(answer[Key.NODE_ID_LIST], answer[Key.SHARE_LIST], nodes)
        for share in _list(answer[Key.SHARE_LIST]):
            if len(share) <= _SHARE_INDEX or (len(share) - _SHARE_INDEX) % _SHARE_BLOCK:
                raise FlowerMessageError(f"a share of a key has {len(share)} bytes")


def _check_keys(keys: list[object]) -> None:
    try:
        found = [load_pem_public_key(key if isinstance(key, bytes) else b"") for key in keys]
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FlowerMessageError(f"a public key cannot be read: {error}") from error
    if not all(isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP384R1) for key in found):
        raise FlowerMessageError("a public key is not one of the curve secp384r1, which all devices use")
    if len({*keys}) < len(keys):
        raise FlowerMessageError("its two public keys are the same")


def _check_pairs(nodes: object, contents: object, expected: set[int]) -> None:
    """Raise FlowerMessageError unless there are bytes for each expected node exactly once."""
    found = _list(nodes)
    if sorted(map(str, found)) != sorted(map(str, expected)):
        raise FlowerMessageError(
            f"it answers for {len(found)} devices, not for the {len(expected)} that it was asked for"
        )
    given = _list(contents)
    if len(given) != len(found) or not all(isinstance(one, bytes) for one in given):
        raise FlowerMessageError(f"it has {len(given)} contents for {len(found)} devices")


def _check_sums(masked: object, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise FlowerMessageError for masked sums whose shapes differ."""
    try:
        found = [bytes_to_ndarray(one) for one in _list(masked) if isinstance(one, bytes)]
    except UNREADABLE_ARRAY as error:
        raise FlowerMessageError(f"masked sums cannot be read: {error}") from error
    if [one.shape for one in found if one.dtype == np.int64] != list(shapes):
        raise FlowerMessageError("the masked sums have other sizes than the job's tensors")


def _check_samples(reply: Message, expected: int) -> None:
    """Raise FlowerMessageError if a masked change has a different number of samples than was reported with its size."""
    try:
        found = recorddict_compat.recorddict_to_fitres(reply.content, keep_input=True).num_examples
    except (KeyError, ValueError, TypeError) as error:
        raise FlowerMessageError(f"its masked change lacks one of Flower's records: {error}") from error
    if found != expected:
        raise FlowerMessageError(f"its masked change is of {found} samples, and it reported {expected}")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
