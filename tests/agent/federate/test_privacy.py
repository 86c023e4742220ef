"""Epsilon against published values, closed forms, and an integral."""

import math

import pytest

from port_agent.federate.privacy import epsilon, renyi


@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)])
def test_the_table_of_tensorflow_privacy(noise: float, epochs: int, published: float) -> None:
    """Its MNIST tutorial (README, 60,000 samples in batches of 256, delta 1e-5), computed there with orders between whole ones too."""
    steps = epochs * 60_000 // 256
    found = epsilon(noise, steps, share=256 / 60_000)
    assert published - 0.01 <= found <= published * 1.02


def test_the_moments_accountant_of_abadi_et_al() -> None:
    """Section 3.2 of arXiv 1607.00133: share 0.01, noise 4, 10,000 steps, delta 1e-5: 1.26."""
    assert epsilon(4.0, 10_000, share=0.01) == pytest.approx(1.26, abs=0.02)


def test_without_sampling_it_is_the_gaussian_mechanism() -> None:
    noise, rounds = 2.0, 20
    best = rounds / (2 * noise**2) + math.sqrt(2 * rounds * math.log(1e5)) / noise  # over all real orders
    assert best <= epsilon(noise, rounds) <= best * 1.01
    assert renyi(noise, 1.0, 5) == pytest.approx(renyi(noise, 1.0 - 1e-12, 5))


def test_one_round_is_the_integral_that_defines_it() -> None:
    noise, share, order = 1.5, 0.3, 4

    def integrand(x: float) -> float:
        away = math.exp(-x * x / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
        there = math.exp(-((x - 1) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
        return away * ((1 - share) + share * there / away) ** order

    step = 1e-3
    moment = math.fsum(integrand(-30 + step * at) * step for at in range(round(60 / step)))
    assert renyi(noise, share, order) == pytest.approx(math.log(moment) / (order - 1), rel=1e-9)


def test_more_noise_and_fewer_rounds_are_more_private() -> None:
    assert epsilon(0.0, 5) == math.inf and epsilon(1.0, 0) == 0.0
    values = [epsilon(noise, 20) for noise in (0.5, 1.0, 2.0, 4.0)]
    assert values == sorted(values, reverse=True)
    assert epsilon(1.0, 5) < epsilon(1.0, 20) < epsilon(1.0, 100)
