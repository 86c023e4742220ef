"""What a device adds to Flower's masking: it sums changes, each tensor in the range of this round's changes,
and it never reveals one.

A secure round begins with a plain message: the device trains, keeps its change, and reports the size of each of its
tensors as a power of two. It then masks that change divided by the largest of the round, so that the 2^22 steps of a
masked sum cover the range of changes. Weights are a thousand times larger, so their sum would lose the changes. A
change is masked only once, because its sums with and without another device's change would reveal the latter.

The leader of a round names its members, forwards their keys and reports which devices became silent. In any case, a
device contributes to no sum of fewer than `FEWEST_MASKED`, and gives no shares of a device that is reported both
alive and silent. Each device signs the keys of the round as it received them, with its own fresh ones. It sends no
change before all devices whose masks are in it have signed the same keys. Keys that the leader made up, or of another
round, end the round there.

A sum shows one device's change if the others' are zero in it. A leader could arrange that: by initial weights at which
the others learn nothing (Pasquini et al. 2022, arXiv 2111.07380), by ranges far above their changes, or by a largest
number of samples far above theirs. So devices sign weights, ranges and that number with the keys, and a device whose
own weight would vanish in the sum contributes nothing.

A leader may name different silent devices to each device. Each device answers once, and the number of required shares
(`safe_threshold`) ensures that no such answers together reveal the mask of one device's change.
"""

import hashlib
import importlib
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from cryptography.fernet import InvalidToken
from flwr.app import ConfigRecord, Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from numpy.typing import NDArray

from port_agent.federate.masks import SUMMED_MODULUS, draw_masks_here
from port_agent.federate.orders import EXPONENTS, FEWEST_MASKED, LOSS, SAMPLES
from port_agent.federate.signatures import DeviceSignatures, SignatureError
from port_agent.federate.tensors import Arrays
from port_agent.federate.wire import array_record, plain_arrays
from port_planner.base.errors import PortError

SUMMED_RANGE = 1.0
"""Range in which changes are sent, as shares of the round's largest change."""
SUMMED_STEPS = 1 << 22
MIN_EXPONENT = -1000
"""Exponent of a tensor that did not change; smaller powers of two cannot be represented."""
_COUNTS = (Key.SAMPLE_NUMBER, Key.SHARE_NUMBER, Key.THRESHOLD)
_SMALLEST_WEIGHT = 2.0**-16
"""Least number of samples, as a share of the round's largest number; below it, a device's
change would be rounded away.
"""
_MARK = b"port-agent: the masking keys, weights and ranges of a round, masks by AES-256"
"""The beginning of the signed content, so that devices that draw their masks in another way do
not take part in the sum.
"""
_BETWEEN = b"."
"""Separator between what is encrypted for a device, in base 64, and the signature of the keys."""
_CHANGE, _FACTS, _RANGES = "port-agent.change", "port-agent.change-facts", "port-agent.round-ranges"
"""Names of the records in the context; a name is used by one record of all kinds together."""
draw_masks_here(importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod"))


class MaskingError(PortError):
    """A stage of secure aggregation would reveal what a device trained, or is out of order."""


def keep_change(context: Context, start: Arrays, trained: Arrays, samples: int, loss: float) -> list[int]:
    """Store the change of a training for the masked sum, and return its exponents by tensor.

    Raises MaskingError if its numbers are not finite.
    """
    change: Arrays = {name: trained[name].astype(np.float64) - start[name].astype(np.float64) for name in start}
    for name, array in change.items():
        if not np.isfinite(array).all():
            raise MaskingError(f"its training gave {name} numbers that are not finite")
    context.state.array_records[_CHANGE] = array_record(change)
    context.state.config_records[_FACTS] = ConfigRecord(
        {"start": _digest(start.values()), SAMPLES: samples, LOSS: loss}
    )
    return [exponent(array) for array in change.values()]


def kept_change(context: Context, start: Iterable[NDArray[np.generic]]) -> tuple[Arrays, int, float]:
    """Return the change that `keep_change` stored, its samples and its loss.

    Raises MaskingError if there is none for these weights.
    """
    facts = context.state.config_records.get(_FACTS, ConfigRecord())
    if facts.get("start") != _digest(start):
        raise MaskingError("no change of these weights was measured, or it was summed already")
    return (
        plain_arrays(context.state.array_records[_CHANGE]),
        int(str(facts[SAMPLES])),
        float(str(facts[LOSS])),
    )


def round_ranges(context: Context) -> bytes:
    """Return the ranges of the masked sum that its first stage brought, which all its devices
    sign; b"" if there were none.
    """
    ranges = context.state.config_records.get(_RANGES, ConfigRecord()).get(EXPONENTS)
    return ranges if isinstance(ranges, bytes) else b""


def scaled(change: Arrays, exponents: bytes) -> list[NDArray[np.float64]]:
    """Return a change as shares of the round's ranges. A single number becomes an array of one,
    because Flower sums no others.

    Raises MaskingError if the ranges do not contain it.
    """
    try:
        ranges = msgspec.json.decode(exponents, type=list[int])
    except msgspec.DecodeError as error:
        raise MaskingError(f"the round's ranges cannot be read: {error}") from error
    if len(ranges) != len(change):
        raise MaskingError(f"{len(ranges)} ranges arrived for {len(change)} tensors")
    shares = [
        np.atleast_1d(np.ldexp(array.astype(np.float64, copy=False), -power))
        for array, power in zip(change.values(), ranges, strict=True)
    ]
    largest = max((float(np.abs(share).max(initial=0.0)) for share in shares), default=0.0)
    if not largest <= SUMMED_RANGE:
        raise MaskingError(f"its change is {largest:.3g} times the range of this round")
    return shares


def exponent(array: NDArray[np.generic]) -> int:
    """Return the least e, from `MIN_EXPONENT` on, so that no number of `array` is larger than 2^e."""
    largest = float(np.abs(array).max(initial=0.0))
    if largest == 0.0:
        return MIN_EXPONENT
    mantissa, power = math.frexp(largest)
    return max(MIN_EXPONENT, power - 1 if mantissa == 0.5 else power)


class GuardedMasking:
    """Flower's masking with the additional checks of `check_stage` and of the signatures of keys.

    A summed change is deleted.
    """

    def __init__(self, signatures: DeviceSignatures) -> None:
        self._signatures = signatures

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message; raises MaskingError, SignatureError, and Flower's own errors for a message out of turn."""
        asked = message.content.config_records[RECORD_KEY_CONFIGS]
        stage = check_stage(asked, _state_of(context))
        if stage == Stage.SETUP:
            context.state.config_records[_RANGES] = ConfigRecord({EXPONENTS: asked.pop(EXPONENTS, b"")})
        elif stage == Stage.COLLECT_MASKED_VECTORS:
            self._check_signed(message, asked, context)
            _check_weight(context)
        try:
            reply = secaggplus_mod(message, context, call_next)
        except InvalidToken as error:
            raise MaskingError("shares that another device encrypted for this one cannot be decrypted") from error
        if stage == Stage.SHARE_KEYS:
            self._sign(message, reply, context)
        elif stage == Stage.COLLECT_MASKED_VECTORS:
            context.state.array_records.pop(_CHANGE, None)
            context.state.config_records.pop(_FACTS, None)
        return reply

    def _sign(self, message: Message, reply: Message, context: Context) -> None:
        """Append this device's signature of the round's keys to everything that it encrypted for another."""
        answer = reply.content.config_records[RECORD_KEY_CONFIGS]
        signature = self._signatures.sign(_signed_keys(message, context))
        encrypted = _parts(answer.get(Key.CIPHERTEXT_LIST))
        answer[Key.CIPHERTEXT_LIST] = [one + _BETWEEN + signature for one in encrypted]

    def _check_signed(self, message: Message, asked: ConfigRecord, context: Context) -> None:
        """Remove the signatures from what others encrypted for this device.

        Raises SignatureError unless all signed the same keys.
        """
        content, encrypted = _signed_keys(message, context), []
        sources = _numbers(asked.get(Key.SOURCE_LIST))
        for source, one in zip(sources, _parts(asked.get(Key.CIPHERTEXT_LIST)), strict=True):
            own, between, signature = one.partition(_BETWEEN)
            if not between:
                raise SignatureError("keys arrived without their device's signature")
            self._signatures.check(source, content, signature)
            encrypted.append(own)
        asked[Key.CIPHERTEXT_LIST] = encrypted


def _signed_keys(message: Message, context: Context) -> bytes:
    """Return the signed content of a round: the round, its initial weights, its ranges and largest number of samples,
    and every device's public keys, all as this device received them.
    """
    state, metadata = _state_of(context), message.metadata
    facts = context.state.config_records.get(_FACTS, ConfigRecord())
    same_for_all = (facts.get("start"), round_ranges(context), state.get(Key.MAX_WEIGHT))
    nodes, keys = _numbers(state.get("public_keys_dict:K")), _parts(state.get("public_keys_dict:V"))
    by_node = sorted(zip(nodes, keys[::2], keys[1::2], strict=True))
    return msgspec.msgpack.encode((_MARK, metadata.run_id, metadata.group_id, same_for_all, by_node))


def _check_weight(context: Context) -> None:
    """Raise MaskingError if this device's change would vanish in the sum, which would then show only the others'."""
    facts, largest = context.state.config_records.get(_FACTS, ConfigRecord()), _state_of(context)[Key.MAX_WEIGHT]
    samples = _whole(facts.get(SAMPLES))
    if not isinstance(largest, float) or samples < _SMALLEST_WEIGHT * largest:
        raise MaskingError(f"its {samples} samples would vanish beside the round's largest number, {largest!r}")


def safe_threshold(devices: int) -> int:
    """Return the least number of required shares with which no false reports of silent devices can
    reveal what one device trained.

    With n devices and t required shares, a change is masked with t - 1 others or more; one of them may be the leader,
    which knows its mask. The t - 2 others would have to be reported silent to t devices each: the leader and t - 1 of
    the n - 1 others, to each of which at most n - t are reported silent. So (t - 1)(t - 2) > (n - 1)(n - t) rules it
    out; and 2 (t - 1) > n - 1, which follows, keeps anyone from obtaining both shares of one device.
    """
    shares = range(FEWEST_MASKED, devices + 1)
    return next(t for t in shares if (t - 1) * (t - 2) > (devices - 1) * (devices - t))


def check_stage(asked: ConfigRecord, state: ConfigRecord) -> str:
    """Return the stage that a leader asks for; raises MaskingError if answering would help to
    reveal one device's change.

    `state`: state of the masking from earlier stages.
    """
    stage = str(asked.get(Key.STAGE))
    if stage == Stage.SETUP:
        devices, shares, threshold = (_whole(asked.get(key)) for key in _COUNTS)
        if min(devices, shares, threshold) < FEWEST_MASKED:
            raise MaskingError(f"sums of fewer than {FEWEST_MASKED} devices reveal what each of them trained")
        if shares != devices or threshold < safe_threshold(devices):
            needed = safe_threshold(devices)
            raise MaskingError(
                f"{threshold} of {shares} shares unmask a sum of {devices} devices, not {needed} of {devices}"
            )
        largest = asked.get(Key.MAX_WEIGHT)
        if not (isinstance(largest, float) and 1.0 <= largest < math.inf):
            raise MaskingError(f"the largest number of samples is {largest!r}, not a finite number from 1 on")
        sums = (asked.get(Key.CLIPPING_RANGE), asked.get(Key.TARGET_RANGE), asked.get(Key.MOD_RANGE))
        if sums != (SUMMED_RANGE, SUMMED_STEPS, SUMMED_MODULUS):
            raise MaskingError(f"range, steps and modulus of the sums are {sums}, not those of this version")
    elif stage == Stage.SHARE_KEYS:
        _check_count(len(asked) - 1, most=_whole(state.get("sample_num")))
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        sources = _numbers(asked.get(Key.SOURCE_LIST))
        _check_count(len({*sources, state["nid"]}))
    elif stage == Stage.UNMASK:
        alive, silent = _numbers(asked.get(Key.ACTIVE_NODE_ID_LIST)), _numbers(asked.get(Key.DEAD_NODE_ID_LIST))
        if len({*alive, *silent}) < len(alive) + len(silent):
            raise MaskingError(
                "a device is listed as alive and silent at once, or twice: both shares would reveal what it trained"
            )
        _check_count(len(alive))
    return stage


def _check_count(devices: int, most: int | None = None) -> None:
    if most is not None and devices > most:
        raise MaskingError(f"keys of {devices} devices arrived for a sum of at most {most}")
    if devices < FEWEST_MASKED:
        raise MaskingError(
            f"{devices} devices are left in the sum; with fewer than {FEWEST_MASKED}, each would know the other's"
        )


def _state_of(context: Context) -> ConfigRecord:
    return context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord())


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _numbers(value: object) -> Sequence[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else ()


def _parts(value: object) -> Sequence[bytes]:
    return [one for one in value if isinstance(one, bytes)] if isinstance(value, list) else ()


def _digest(arrays: Iterable[NDArray[np.generic]]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
