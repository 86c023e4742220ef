"""How private a federation with clipping and noise is: the epsilon of its rounds together, by Rényi differential privacy.

Of one device more or less (all its data), against whoever sees the averaged weights. The leader itself sees each clipped change
before the noise. No Flower and no numpy: the command line tells it before a round begins.
"""

import math

DELTA = 1e-5
"""Far below one over the number of devices in a household, as it has to be."""
_ORDERS = range(2, 513)


def epsilon(noise: float, rounds: int, *, share: float = 1.0, delta: float = DELTA) -> float:
    """Return epsilon at `delta` of so many rounds with noise of `noise` times the norm; infinity without noise.

    `share` is the probability with which a device takes part in a round; 1 where all that are ready do. From order to epsilon by
    proposition 3 of Mironov 2017 (arXiv 1702.07476), the best of the whole orders to 512.
    """
    if rounds == 0:
        return 0.0
    if noise == 0.0:
        return math.inf
    return min(rounds * renyi(noise, share, order) - math.log(delta) / (order - 1) for order in _ORDERS)


def renyi(noise: float, share: float, order: int) -> float:
    """Return the Rényi divergence of a whole order of one round of the sampled Gaussian mechanism.

    Section 3.3 of Mironov, Talwar, Zhang 2019 (arXiv 1908.10530): the logarithm of the sum over k of C(order, k) (1 - share)^(order - k)
    share^k exp((k^2 - k) / (2 noise^2)), over order - 1.
    """
    if share == 1.0:
        return order / (2.0 * noise**2)
    terms = [
        math.lgamma(order + 1)
        - math.lgamma(k + 1)
        - math.lgamma(order - k + 1)
        + (order - k) * math.log1p(-share)
        + k * math.log(share)
        + (k * k - k) / (2.0 * noise**2)
        for k in range(order + 1)
    ]
    largest = max(terms)
    return (largest + math.log(math.fsum(math.exp(term - largest) for term in terms))) / (order - 1)
