"""The code: shown one way, read in many, slips of the finger cost no try."""

import re

import pytest

from port_agent.peers.pairing.code import RANDOM_DIGITS, TRIES, PairingCodeError, new_code, read_code


def test_codes_are_random_and_read_in_any_grouping() -> None:
    codes = {new_code() for _ in range(1000)}
    assert len(codes) > 990
    for code in codes:
        assert re.fullmatch(r"\d{3}-\d{3}-\d{3}", code)
        digits = code.replace("-", "")
        assert read_code(code) == read_code(f" {digits}\n") == read_code(" ".join(digits)) == digits


@pytest.mark.parametrize("text", ["", "12345678", "1234567890", "abc-def-ghi", "１２３-456-789", "482-193-05x"])
def test_what_is_no_code(text: str) -> None:
    with pytest.raises(PairingCodeError, match="not a valid pairing code of 9 digits"):
        read_code(text)


def test_each_wrong_digit_is_noticed_before_a_try_is_lost() -> None:
    digits = read_code(new_code())
    for place, right in enumerate(digits):
        for wrong in set("0123456789") - {right}:
            with pytest.raises(PairingCodeError, match="mistyped"):
                read_code(digits[:place] + wrong + digits[place + 1 :])


def test_what_is_said_of_guessing_is_right() -> None:
    assert 10**RANDOM_DIGITS // TRIES == 33_333_333
