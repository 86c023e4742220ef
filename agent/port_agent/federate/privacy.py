"""How private noisy rounds are, and how much of its privacy budget a device's data has spent.

The guarantee is for one device, against anyone who sees the averaged weights: its clipped change is in an average, or a
zero is in its place. The number of devices is known (a fixed denominator). The leader itself sees each clipped change
before the noise, and must be trusted to add it. This module needs neither Flower nor numpy, because the command line
uses it before a round begins.
"""

import contextlib
import fcntl
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from port_agent.system.atomic_file import write_atomically
from port_planner.base.errors import PortError

DELTA = 1e-5
"""Delta of the guarantee, which must be far below one over the number of devices in a household."""
PRIVACY_FOLDER = "privacy"
_TOLERANCE = 1e-9
_NO_NOISE = 1e12
"""Bound of one over the noise squared, for a noise of a millionth of the norm; with less there is no privacy, and
numbers lose their last digits.
"""
_FAR = 30.0
"""Standard deviations beyond which the complementary error function is replaced by its series."""


def epsilon(inverse_square_noise: float, delta: float = DELTA) -> float:
    """Return epsilon at `delta` for several Gaussian mechanisms, given the sum of one over each
    squared noise multiplier.

    They compose to one Gaussian mechanism, whose epsilon is exact: theorem 8 of Balle and Wang 2018 (arXiv 1805.06530).
    """
    if inverse_square_noise == 0.0:
        return 0.0
    if not inverse_square_noise <= _NO_NOISE:
        return math.inf
    distance, low, high = math.sqrt(inverse_square_noise), 0.0, 1.0
    while _delta(high, distance) > delta:
        low, high = high, 2.0 * high
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(middle, distance) > delta else (low, middle)
    return high


def noisy_rounds(noise: float, rounds: int) -> float:
    """Return the argument of `epsilon` for `rounds` rounds with noise of `noise` times the
    norm; infinity without noise.
    """
    if rounds == 0:
        return 0.0
    return rounds / noise / noise if noise else math.inf


def _delta(eps: float, distance: float) -> float:
    """Return the delta for which a Gaussian mechanism whose two means are `distance` standard
    deviations apart has this epsilon.
    """
    near, far = eps / distance - distance / 2, eps / distance + distance / 2
    return math.exp(_log_tail(near)) - math.exp(eps + _log_tail(far))


def _log_tail(x: float) -> float:
    """Return the logarithm of the probability that a standard normal number is above x."""
    if x < _FAR:
        return math.log(math.erfc(x / math.sqrt(2.0)) / 2.0)
    series = math.log1p(-1.0 / x**2 + 3.0 / x**4 - 15.0 / x**6)
    return -x * x / 2.0 - math.log(x * math.sqrt(2.0 * math.pi)) + series


class PrivacySpent(msgspec.Struct, frozen=True):
    """The privacy that all contributions made from some data have spent together."""

    inverse_square_noise: float = 0.0
    rounds: int = 0
    """Number of rounds with noise."""
    bare: int = 0
    """Number of rounds without noise."""
    last: str = ""
    """The hash of the message that was answered last; if it is answered again, that counts once."""

    @property
    def epsilon(self) -> float:
        """Epsilon at `DELTA`; infinity after a contribution without noise."""
        return math.inf if self.bare else epsilon(self.inverse_square_noise)

    def after(self, noise: float, message: str) -> "PrivacySpent":
        """Return the total with one more contribution, for the answer to a message."""
        if message == self.last:
            return self
        added = self.inverse_square_noise + noisy_rounds(noise, 1)
        if math.isinf(epsilon(added)):  # without noise, or with so little that it hides nothing
            return msgspec.structs.replace(self, bare=self.bare + 1, last=message)
        return msgspec.structs.replace(self, inverse_square_noise=added, rounds=self.rounds + 1, last=message)


class BudgetSpentError(PortError):
    """A contribution would spend more of some data's privacy than is allowed."""


class PrivacyLedger:
    """What the data with one hash has spent, over all jobs and federations of this device, in a file."""

    def __init__(self, state_dir: Path, data: str) -> None:
        self._file = state_dir / PRIVACY_FOLDER / f"{data}.json"

    def spent(self) -> PrivacySpent:
        """Return the total.

        Raises OSError. Raises msgspec.MsgspecError for a damaged file, because starting at zero would be wrong.
        """
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=PrivacySpent)
        except FileNotFoundError:
            return PrivacySpent()

    def check(self, noise: float, message: str, budget: float) -> PrivacySpent:
        """Return the total with one more contribution, the answer to the message with this hash.

        Raises BudgetSpentError if it exceeds `budget`, and as `spent` does.
        """
        spent = self.spent()
        after = spent.after(noise, message)
        if after != spent and after.epsilon > budget:
            raise BudgetSpentError(
                f"its data has spent an epsilon of {spent.epsilon:.3g} at delta {DELTA:g}; this round would make it "
                f"{after.epsilon:.3g}, above the budget of {budget:g}; lead with more --noise"
            )
        return after

    def spend(self, noise: float, message: str, budget: float = math.inf) -> None:
        """Record a contribution, durably, before it is sent; raises BudgetSpentError, OSError, msgspec.MsgspecError."""
        self._file.parent.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            write_atomically(self._file, msgspec.json.encode(self.check(noise, message, budget)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Block other jobs with the same data."""
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
