"""The id of a device: one spelling printed, many read, no single slip taken for another device."""

import hashlib
import string

import pytest

from port_agent.peers.identity.device_id import DeviceId, DeviceIdError, check_digit, is_short_id, read_device_id

ONE = DeviceId(hashlib.sha256(b"one").digest())
PRINTED = "O2JMHLJ-VIC5YAH-PACBM5O-4ZWNRCY-DREMRU5-IGG44KA-DYCW5OP-7UGHWQO"
ALPHABET = string.ascii_uppercase + "234567"


def test_one_spelling_is_printed() -> None:
    assert str(ONE) == PRINTED
    assert (ONE.group, ONE.short) == (PRINTED[:7], hashlib.sha256(b"one").hexdigest()[:12])
    assert is_short_id(ONE.short) and not is_short_id(ONE.digest.hex()) and not is_short_id(ONE.short.upper())


def without_checks(text: str) -> str:
    symbols = text.replace("-", "")
    return "".join(symbols[at : at + 13] for at in range(0, len(symbols), 14))


@pytest.mark.parametrize(
    "text",
    [
        PRINTED,
        PRINTED.lower(),
        PRINTED.replace("-", ""),
        PRINTED.replace("-", " "),
        f"  {PRINTED}\n",
        without_checks(PRINTED),
        PRINTED.replace("O", "0").replace("I", "1").replace("B", "8"),
    ],
)
def test_many_spellings_are_read(text: str) -> None:
    assert read_device_id(text) == ONE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "0 letters and digits, not 56"),
        (PRINTED[:-1], "it has 55 letters"),
        (PRINTED + "A", "it has 57 letters"),
        ("9" + PRINTED[1:], "it holds '9'"),
        (PRINTED[:-1] + "!", "it holds '!'"),
        ("Ä" + without_checks(PRINTED)[1:], "it holds 'Ä'"),
        (without_checks(PRINTED)[:-1] + "B", "last letter"),
        ("A" + PRINTED[1:], "typing error in groups 1 and 2"),
        ("ozz" * 10_000, "it has 30000 letters"),
    ],
)
def test_what_is_no_id_says_why(text: str, reason: str) -> None:
    with pytest.raises(DeviceIdError, match=reason) as caught:
        read_device_id(text)
    assert len(str(caught.value)) < 250


def test_every_wrong_symbol_is_seen() -> None:
    symbols = PRINTED.replace("-", "")
    for place, right in enumerate(symbols):
        for wrong in set(ALPHABET) - {right}:
            with pytest.raises(DeviceIdError):
                read_device_id(symbols[:place] + wrong + symbols[place + 1 :])


def test_neighbours_exchanged_are_seen_but_the_ends_of_the_alphabet() -> None:
    for left in ALPHABET:
        for right in ALPHABET:
            same = check_digit("A" * 11 + left + right) == check_digit("A" * 11 + right + left)
            assert same == (left == right or {left, right} == {"A", "7"})
