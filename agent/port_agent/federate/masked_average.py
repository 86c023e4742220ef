"""A round whose leader only sees sums: the sizes of changes first, then their masked sum by Flower's SecAgg+."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common import Metrics, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.common.secure_aggregation.secaggplus_constants import Key as Masking
from flwr.compat.common import recorddict_compat
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg as MaskedFedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

from port_agent.federate.grid import PeerGrid
from port_agent.federate.masking import MIN_EXPONENT, SUMMED_MODULUS, SUMMED_RANGE, SUMMED_STEPS, safe_threshold
from port_agent.federate.orders import (
    ARRAYS,
    CONFIG,
    EXPONENTS,
    FEWEST_MASKED,
    LOSS,
    MEASURED,
    SAMPLES,
    RoundOrder,
)
from port_agent.federate.replies import RoundAbandonedError, check_metrics, reasons, require_replies
from port_agent.federate.tensors import Arrays, FederatedTensors
from port_agent.federate.wire import UNREADABLE_ARRAY, FlowerMessageError, array_record, plain_arrays

LEADER_NODE = 1
_COARSEST = 0.01
"""A sum whose steps are a larger share of the change than this is not a usable average."""
_MAX_EXPONENT = 1024


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the devices of a round reported about their changes."""

    samples: Mapping[int, int]
    """By node."""
    losses: tuple[float, ...]
    exponents: tuple[int, ...]
    """By tensor, of the largest change of any device."""


class MaskedAverage:
    """The average of one round."""

    def __init__(self, order: RoundOrder, tensors: FederatedTensors, grid: PeerGrid) -> None:
        self._order, self._tensors, self._grid = order, tensors, grid

    def average(self, arrays: Arrays) -> tuple[Arrays, int, float | None]:
        """Return the averaged weights, how many devices are in them, and their loss. Raises RoundAbandonedError."""
        sizes = self._measured(arrays)
        shares, counts = self._summed(arrays, sizes)
        change = {
            name: np.ldexp(share.astype(np.float64), power)
            for (name, share), power in zip(shares.items(), sizes.exponents, strict=True)
        }
        self._check_steps(change, sizes, counts)
        averaged = {
            name: (array.astype(np.float64) + change[name]).astype(array.dtype) for name, array in arrays.items()
        }
        return averaged, len(counts), math.fsum(sizes.losses) / len(sizes.losses)

    def _measured(self, arrays: Arrays) -> _Sizes:
        """Make all devices train, and return what they report about it."""
        content = RecordDict({ARRAYS: array_record(arrays), CONFIG: ConfigRecord({MEASURED: True})})
        number = str(self._order.number)
        messages = [Message(content, node, MessageType.TRAIN, group_id=number) for node in self._order.nodes]
        replies = self._grid.send_and_receive(messages, timeout=self._order.timeout_s)
        require_replies(len(replies), self._order, self._grid.lost, fewest=FEWEST_MASKED)
        metrics = {reply.metadata.src_node_id: reply.content.metric_records["metrics"] for reply in replies}
        samples = {node: int(str(metrics[node][SAMPLES])) for node in sorted(metrics)}
        exponents = zip(*(_exponents(one[EXPONENTS]) for one in metrics.values()), strict=True)
        losses = tuple(float(str(metrics[node][LOSS])) for node in samples)
        return _Sizes(samples, losses, tuple(max(powers) for powers in exponents))

    def _summed(self, arrays: Arrays, sizes: _Sizes) -> tuple[Arrays, list[int]]:
        """Return the average of the changes as shares of the round's ranges, and the samples of those that are in it."""
        counts: list[int] = []

        def note(metrics: list[tuple[int, Metrics]]) -> Metrics:
            counts.extend(samples for samples, _ in metrics)
            return {}

        order, manager, count = self._order, SimpleClientManager(), len(sizes.samples)
        for node in sizes.samples:
            manager.register(GridClientProxy(node, self._grid, order.run_id))
        ranges = msgspec.json.encode(sizes.exponents)
        strategy = MaskedFedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=count,
            min_available_clients=count,
            on_fit_config_fn=lambda number: {EXPONENTS: ranges},
            fit_metrics_aggregation_fn=note,
        )
        context = LegacyContext(Context(order.run_id, LEADER_NODE, {}, RecordDict(), {}), None, strategy, manager)
        before = recorddict_compat.parameters_to_arrayrecord(ndarrays_to_parameters(list(arrays.values())), True)
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: order.number})
        context.state.array_records[MAIN_PARAMS_RECORD] = before
        workflow = SecAggPlusWorkflow(
            1.0,
            max(safe_threshold(count), math.ceil(order.min_share * count)),
            max_weight=float(max(sizes.samples.values())),
            clipping_range=SUMMED_RANGE,
            quantization_range=SUMMED_STEPS,
            modulus_range=SUMMED_MODULUS,
            timeout=order.timeout_s,
        )
        workflow(self._grid, context)
        after = context.state.array_records[MAIN_PARAMS_RECORD]
        if after is before:
            raise RoundAbandonedError(
                f"too few devices took part in all stages of secure aggregation, which needs {safe_threshold(count)} of {count} "
                f"({reasons(order, self._grid.lost)})"
            )
        return dict(zip(arrays, plain_arrays(after).values(), strict=True)), counts

    def _check_steps(self, change: Arrays, sizes: _Sizes, counts: list[int]) -> None:
        """Raise RoundAbandonedError if the steps of the sum are too large a share of the change."""
        largest = max(sizes.samples.values())
        step = 2 * SUMMED_RANGE / SUMMED_STEPS * len(counts) * largest / sum(counts)
        squares = zip(change.values(), sizes.exponents, strict=True)
        steps = math.sqrt(math.fsum(array.size * math.ldexp(step, power) ** 2 for array, power in squares))
        size = math.sqrt(math.fsum(float(np.square(array, dtype=np.float64).sum()) for array in change.values()))
        if steps > _COARSEST * size and any(power > MIN_EXPONENT for power in sizes.exponents):
            raise RoundAbandonedError(
                f"the steps of the masked sum are {steps / size if size else math.inf:.1%} of the average change, more than "
                f"{_COARSEST:.0%}: the devices' changes cancel each other; average without --secure, or train longer in a round"
            )

    def check(self, reply: Message) -> None:
        """Raise FlowerMessageError for a reply that does not fit the stage of this round."""
        masking = reply.content.config_records.get(RECORD_KEY_CONFIGS)
        if masking is None:
            metrics = check_metrics(reply, LOSS, EXPONENTS)
            powers = _exponents(metrics[EXPONENTS])
            if len(powers) != len(self._tensors.layouts) or not all(
                MIN_EXPONENT <= power <= _MAX_EXPONENT for power in powers
            ):
                raise FlowerMessageError("the sizes of the change do not belong to the job's tensors")
        elif Masking.MASKED_PARAMETERS in masking:
            self._check_sums(masking[Masking.MASKED_PARAMETERS])

    def _check_sums(self, masked: object) -> None:
        """Raise FlowerMessageError for masked sums of other sizes than these tensors, with the weight before them."""
        shapes = [(1,), *(tuple(layout.shape) for layout in self._tensors.layouts.values())]
        try:
            found = (
                [bytes_to_ndarray(one) for one in masked if isinstance(one, bytes)] if isinstance(masked, list) else []
            )
        except UNREADABLE_ARRAY as error:
            raise FlowerMessageError(f"masked sums cannot be read: {error}") from error
        if [one.shape for one in found if one.dtype == np.int64] != shapes:
            raise FlowerMessageError("the masked sums have other sizes than the job's tensors")


def _exponents(value: object) -> list[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []
