"""When weights are set to zero during training, which is a job's own choice and changes the numbers."""

from dataclasses import dataclass

from port_planner.base.errors import PortError

LARGEST_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Pruning:
    """Sets the weights of smallest magnitude to zero.

    Their share of each matrix grows from update `begin` to `end`, as in Zhu and Gupta (arXiv 1710.01878), and then
    stays. The threshold is recomputed every `every` updates.
    """

    sparsity: float
    """Final share of zeros among the items of each trained weight with two or more dimensions."""
    end: int
    begin: int = 0
    every: int = 10

    def __post_init__(self) -> None:
        """Raise PortError for an invalid schedule."""
        if not 0 < self.sparsity <= LARGEST_SHARE:
            raise PortError(
                f"pruning to {self.sparsity:g} of the weights is not possible; the share must be above 0 and at most "
                f"{LARGEST_SHARE}"
            )
        if not 0 <= self.begin < self.end or self.every < 1:
            raise PortError(
                f"pruning from update {self.begin} to {self.end}, every {self.every}; it begins at 0 or later, ends "
                "after that, and every update or every few of them count"
            )

    def sparsity_at(self, update: int) -> float:
        """Return the share of zeros after that many updates."""
        left = 1 - min(max(update - self.begin, 0) / (self.end - self.begin), 1.0)
        return self.sparsity * (1 - left**3)

    def looks(self, update: int) -> bool:
        """Return whether the threshold is recomputed after that many updates."""
        return self.begin < update <= self.end and ((update - self.begin) % self.every == 0 or update == self.end)
