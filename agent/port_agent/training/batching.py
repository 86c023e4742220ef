"""Which batches of the samples a run uses, and which of them one program runs together."""

import itertools
from collections.abc import Iterator, Sequence

import torch

from port_agent.training.samples.columns import DataError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.data_order import bucket_batches
from port_planner.ir.bundle.manifest import WHOLE_UPDATE, BucketSize, batch_kind, graph_name

BatchRows = tuple[int, int, torch.Tensor]
"""The epoch of a batch, its bucket, and its rows in that bucket."""


class Batching:
    """The batches of a bundle's job, given the number of samples in each bucket.

    `compared`: number of first batches that are compared with plain PyTorch's. The last, short batch of a bucket is
    left out if the job says so, and if no plan was made for its size.
    """

    def __init__(self, bundle: Bundle, counts: Sequence[int], compared: int) -> None:
        self._manifest, self._compared = bundle.manifest, compared
        manifest = bundle.manifest
        kind = batch_kind(0, manifest.accumulate)
        pairs = zip(counts, manifest.sizes, strict=True)
        self._sizes = [BucketSize(count, size.batch_size) for count, size in pairs]
        self._drop_last = [
            manifest.drop_last or graph_name(kind, size.samples % size.batch_size, size, bucket) not in bundle.graphs
            for bucket, size in enumerate(self._sizes)
        ]
        self._count = manifest.batches_of(WHOLE_UPDATE) if WHOLE_UPDATE in bundle.graphs else 1
        drops = zip(self._sizes, self._drop_last, strict=True)
        self.per_epoch = sum(size.batches(drop_last=drop) for size, drop in drops)
        """Batches in one pass over the samples."""

    def runs(self, step: int, total: int, *, before: int = 0) -> Iterator[Sequence[BatchRows]]:
        """Yield the batches that run together, from the one after `step` to `total`: each alone, or all of an update.

        `before`: number of batches of the data that were used before the job's first. An update in which the comparison
        with plain PyTorch ends is not run as one, because its state is compared in the middle. Raises DataError if the
        samples do not make a batch.
        """
        manifest = self._manifest
        if self.per_epoch == 0:
            raise DataError(
                f"{sum(size.samples for size in self._sizes)} samples are too few for a batch of "
                f"{manifest.batch_size}; wait for more"
            )
        count = self._count
        batches = bucket_batches(manifest.seed, self._sizes, drop_last=self._drop_last, start=before + step)
        while step < total:
            ends_within = step < self._compared < step + count
            whole = step % count == 0 and step + count <= total and not ends_within
            taken = list(itertools.islice(batches, count if whole else 1))
            step += len(taken)
            alike = all(bucket == 0 and rows.numel() == manifest.batch_size for _, bucket, rows in taken)
            yield from [taken] if count > 1 and whole and alike else ([one] for one in taken)
