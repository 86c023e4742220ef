"""Epsilon against published values and the integral that defines it; what data spends over its life."""

import math
from pathlib import Path

import msgspec
import pytest

from port_agent.federate.privacy import BudgetSpentError, PrivacyLedger, epsilon, noisy_rounds


def hockey_stick(eps: float, noise: float) -> float:
    """Return the delta of one round by its definition, a sum over both densities (Balle and Wang 2018, theorem 5)."""
    step, edge = 1e-4 * noise, 12.0 * noise

    def density(x: float, mean: float) -> float:
        return math.exp(-((x - mean) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))

    places = (-edge + step * (at + 0.5) for at in range(round((2 * edge + 1) / step)))
    return math.fsum(max(0.0, density(x, 1.0) - math.exp(eps) * density(x, 0.0)) * step for x in places)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_one_round_is_the_integral_that_defines_it(noise: float) -> None:
    assert hockey_stick(epsilon(noisy_rounds(noise, 1)), noise) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize(("noise", "rounds", "numeric"), [(1.0, 1, 4.3772), (2.0, 4, 4.3772), (10.0, 100, 4.3772)])
def test_rounds_compose_to_one_gaussian_mechanism(noise: float, rounds: int, numeric: float) -> None:
    """4.3772 for noise 1 at delta 1e-5 is what privacy loss distributions give; 16 rounds of
    noise 4 are one of noise 1.
    """
    assert epsilon(noisy_rounds(noise, rounds)) == pytest.approx(numeric, abs=2e-4)


def test_it_is_tighter_than_renyi_differential_privacy() -> None:
    renyi = min(order * 20 / (2 * 2.0**2) + math.log(1e5) / (order - 1) for order in range(2, 513))
    assert 1.10 < renyi / epsilon(noisy_rounds(2.0, 20)) < 1.64


def test_ends_of_the_range() -> None:
    assert epsilon(noisy_rounds(0.0, 5)) == math.inf and epsilon(noisy_rounds(1.0, 0)) == 0.0
    values = [epsilon(noisy_rounds(noise, 20)) for noise in (1e-3, 0.5, 1.0, 4.0, 1e3, 1e6)]
    assert values == sorted(values, reverse=True) and all(0.0 <= value < math.inf for value in values)


def test_what_another_job_spent_meanwhile_counts_before_anything_goes(tmp_path: Path) -> None:
    one, other = PrivacyLedger(tmp_path, "data"), PrivacyLedger(tmp_path, "data")
    for ledger, message in ((one, "one"), (other, "other")):
        ledger.check(1.0, message, 5.0)
    one.spend(1.0, "one", 5.0)
    with pytest.raises(BudgetSpentError, match=r"this round would make it 6\.57, above the budget of 5"):
        other.spend(1.0, "other", 5.0)
    one.spend(1.0, "one", 4.0)
    assert one.spent().rounds == 1, "the same message again spends nothing"


def test_what_is_spent_adds_up_over_federations_and_counts_a_message_once(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, "data")
    assert ledger.spent().epsilon == 0.0
    for message in ("one", "one", "two"):
        ledger.spend(2.0, message)
    PrivacyLedger(tmp_path, "data").spend(1.0, "another federation")
    spent = ledger.spent()
    assert (spent.rounds, spent.inverse_square_noise) == (3, 1.5) and spent.epsilon == epsilon(1.5)
    assert PrivacyLedger(tmp_path, "other data").spent().rounds == 0
    ledger.spend(0.0, "bare")
    assert ledger.spent().epsilon == math.inf
    (tmp_path / "privacy/data.json").write_text("{")
    with pytest.raises(msgspec.DecodeError):
        ledger.spent()


def test_noise_too_small_to_be_any_is_none_and_leaves_the_ledger_readable(tmp_path: Path) -> None:
    """One over its square is more than a number holds, or than numbers of JSON do."""
    ledger = PrivacyLedger(tmp_path, "data")
    for message, noise in (("one", 1e-5), ("two", 1e-154), ("three", 1e-154), ("four", 1e-200)):
        ledger.spend(noise, message)
    spent = ledger.spent()
    assert (spent.rounds, spent.bare, spent.epsilon) == (1, 3, math.inf)
    assert epsilon(spent.inverse_square_noise) == pytest.approx(5e9, rel=1e-3)
