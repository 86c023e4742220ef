"""A round whose leader sees only sums: first the sizes of changes, then their masked sum by Flower's SecAgg+."""

import importlib
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common import Metrics, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Stage
from flwr.common.secure_aggregation.secaggplus_constants import Key as StageKey
from flwr.compat.common import recorddict_compat
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg as MaskedFedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid

from port_agent.federate.grid import PeerGrid
from port_agent.federate.masked_replies import check_stage_reply
from port_agent.federate.masking import MIN_EXPONENT, SUMMED_RANGE, SUMMED_STEPS, safe_threshold
from port_agent.federate.masks import SUMMED_MODULUS, draw_masks_here
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
from port_agent.federate.replies import (
    RoundAbandonedError,
    check_metrics,
    check_records,
    reasons,
    require_replies,
    too_large,
)
from port_agent.federate.tensors import Arrays, FederatedTensors
from port_agent.federate.wire import FlowerMessageError, array_record, plain_arrays

LEADER_NODE = 1
_COARSEST = 0.01
"""Largest step of a sum, as a share of the change; with larger steps, the sum is not a usable average."""
_MAX_EXPONENT, _MAX_EXPONENTS = 129, {"float64": 1023}
"""Largest exponent of a change between two numbers of a type: twice the largest number."""
_SUM_ROUNDING = 1.001
"""Amount in steps by which an average of shares may lie outside of its range, because of rounding."""
_FAR_OUT = 8.0
"""Factor over the median: a device whose largest change exceeds it is named as the cause of
steps that are too coarse.
"""
draw_masks_here(importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow"))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The devices' reports about their changes."""

    samples: Mapping[int, int]
    """Samples by node."""
    loss: float
    """Mean loss of their samples."""
    exponents: tuple[int, ...]
    """Exponent of the largest change of any device, by tensor."""
    cause: str
    """Why the steps of a sum with these ranges would be too coarse."""


class _Masking(SecAggPlusWorkflow):
    """Flower's stages.

    Flower asks for shares of a device that left before it gave any: there are none, and
    nothing is masked with its keys.
    """

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Count only devices that shared their keys among those that may become silent."""
        goes_on: bool = super().share_keys_stage(grid, context, state)
        state.sampled_node_ids = {*state.active_node_ids}
        return goes_on


class MaskedAverage:
    """The average of one round."""

    def __init__(self, order: RoundOrder, tensors: FederatedTensors, grid: PeerGrid) -> None:
        self._order, self._tensors, self._grid = order, tensors, grid
        self._samples: Mapping[int, int] = {}
        """Numbers of samples of the devices in the sum."""
        self._ranges = b""

    def average(self, arrays: Arrays) -> tuple[Arrays, int, float | None]:
        """Return the averaged weights, the number of devices in them, and their loss. Raises RoundAbandonedError."""
        sizes = self._measured(arrays)
        shares, counts = self._summed(arrays, sizes)
        _check_shares(shares)
        change = {
            name: np.ldexp(share.astype(np.float64), power)
            for (name, share), power in zip(shares.items(), sizes.exponents, strict=True)
        }
        self._check_steps(change, sizes, counts)
        averaged = {
            name: (array.astype(np.float64) + change[name]).astype(array.dtype) for name, array in arrays.items()
        }
        return averaged, len(counts), sizes.loss

    def _measured(self, arrays: Arrays) -> _Sizes:
        """Make all devices train, and return their reports."""
        content = RecordDict({ARRAYS: array_record(arrays), CONFIG: ConfigRecord({MEASURED: True})})
        number = str(self._order.number)
        messages = [Message(content, node, MessageType.TRAIN, group_id=number) for node in self._order.nodes]
        replies = self._grid.send_and_receive(messages, timeout=self._order.timeout_s)
        metrics = {reply.metadata.src_node_id: reply.content.metric_records["metrics"] for reply in replies}
        counts = {node: int(str(metrics[node][SAMPLES])) for node in sorted(metrics)}
        powers = {node: max(_exponents(one[EXPONENTS])) for node, one in metrics.items()}
        largest = {node: math.ldexp(1.0, power) if power > MIN_EXPONENT else 0.0 for node, power in powers.items()}
        wrong = too_large("change", largest) | too_large("number of samples", counts)
        self._grid.lost.update(wrong)
        require_replies(len(replies) - len(wrong), self._order, self._grid.lost, fewest=FEWEST_MASKED)
        samples = {node: count for node, count in counts.items() if node not in wrong}
        exponents = zip(*(_exponents(metrics[node][EXPONENTS]) for node in samples), strict=True)
        loss = math.fsum(count * float(str(metrics[node][LOSS])) for node, count in samples.items())
        cause = self._cause({node: largest[node] for node in samples})
        return _Sizes(samples, loss / sum(samples.values()), tuple(max(powers) for powers in exponents), cause)

    def _cause(self, largest: Mapping[int, float]) -> str:
        """Return why the steps of a sum may be too coarse, given the largest change of each device."""
        farthest, middle = max(largest, key=largest.__getitem__), statistics.median(largest.values())
        if middle and largest[farthest] > _FAR_OUT * middle:
            times = largest[farthest] / middle
            return f"the largest change that {self._order.names[farthest]} reported is {times:.1e} times the median"
        return "the devices' changes cancel each other"

    def _summed(self, arrays: Arrays, sizes: _Sizes) -> tuple[Arrays, list[int]]:
        """Return the average of the changes as shares of the round's ranges, and the samples of the devices in it."""
        counts: list[int] = []

        def note(metrics: list[tuple[int, Metrics]]) -> Metrics:
            counts.extend(samples for samples, _ in metrics)
            return {}

        self._samples, self._ranges = sizes.samples, msgspec.json.encode(sizes.exponents)
        order, manager, count = self._order, SimpleClientManager(), len(sizes.samples)
        for node in sizes.samples:
            manager.register(GridClientProxy(node, self._grid, order.run_id))
        strategy = MaskedFedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=count,
            min_available_clients=count,
            fit_metrics_aggregation_fn=note,
        )
        context = LegacyContext(Context(order.run_id, LEADER_NODE, {}, RecordDict(), {}), None, strategy, manager)
        before = recorddict_compat.parameters_to_arrayrecord(ndarrays_to_parameters(list(arrays.values())), True)
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: order.number})
        context.state.array_records[MAIN_PARAMS_RECORD] = before
        workflow = _Masking(
            1.0,
            max(safe_threshold(count), math.ceil(order.min_share * count)),
            max_weight=float(max(sizes.samples.values())),
            clipping_range=SUMMED_RANGE,
            quantization_range=SUMMED_STEPS,
            modulus_range=SUMMED_MODULUS,
            timeout=order.timeout_s,
        )
        try:
            workflow(self._grid, context)
        except (KeyError, ValueError, TypeError) as error:  # what Flower raises for shares that fit nothing
            raise RoundAbandonedError(f"a device sent false keys or shares: {error}") from error
        after = context.state.array_records[MAIN_PARAMS_RECORD]
        if after is before:
            raise RoundAbandonedError(
                f"too few devices took part in all stages of secure aggregation, which needs {safe_threshold(count)} "
                f"of {count} ({reasons(order, self._grid.lost)})"
            )
        summed = zip(arrays.items(), plain_arrays(after).values(), strict=True)
        return {name: share.reshape(array.shape) for (name, array), share in summed}, counts

    def _check_steps(self, change: Arrays, sizes: _Sizes, counts: list[int]) -> None:
        """Raise RoundAbandonedError if the steps of the sum are too large a share of the change."""
        largest = max(sizes.samples.values())
        step = 2 * SUMMED_RANGE / SUMMED_STEPS * len(counts) * largest / sum(counts)
        squares = zip(change.values(), sizes.exponents, strict=True)
        steps = math.sqrt(math.fsum(array.size * math.ldexp(step, power) ** 2 for array, power in squares))
        size = math.sqrt(math.fsum(float(np.square(array, dtype=np.float64).sum()) for array in change.values()))
        if steps > _COARSEST * size and any(power > MIN_EXPONENT for power in sizes.exponents):
            raise RoundAbandonedError(
                f"the steps of the masked sum are {steps / size if size else math.inf:.1%} of the average change, more "
                f"than {_COARSEST:.0%}: {sizes.cause}; average without --secure, or train longer in a round"
            )

    def amend(self, message: Message) -> None:
        """Add the round's ranges to the first message of a masked sum, so that devices sign them with their keys."""
        stage = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        if stage.get(StageKey.STAGE) == Stage.SETUP:
            stage[EXPONENTS] = self._ranges

    def check(self, asked: Message, reply: Message) -> None:
        """Raise FlowerMessageError for a reply that does not fit the stage of this round."""
        if RECORD_KEY_CONFIGS in asked.content.config_records:
            shapes = [(1,), *(tuple(layout.shape) or (1,) for layout in self._tensors.layouts.values())]
            check_stage_reply(asked, reply, shapes, self._samples)
            return
        check_records(reply)
        powers = _exponents(check_metrics(reply, LOSS, EXPONENTS)[EXPONENTS])
        most = [_MAX_EXPONENTS.get(layout.dtype, _MAX_EXPONENT) for layout in self._tensors.layouts.values()]
        if len(powers) != len(most) or not all(
            MIN_EXPONENT <= one <= end for one, end in zip(powers, most, strict=True)
        ):
            raise FlowerMessageError("the sizes of the change do not belong to the job's tensors")


def _check_shares(shares: Arrays) -> None:
    """Raise RoundAbandonedError for a sum that cannot be one of changes in the round's ranges;
    false masks put it anywhere.
    """
    for name, share in shares.items():
        largest = float(np.abs(share).max(initial=0.0))
        if not largest <= SUMMED_RANGE * _SUM_ROUNDING:
            raise RoundAbandonedError(
                f"the average of {name} is {largest:.3g} times the largest change: a device sent false masks or shares"
            )


def _exponents(value: object) -> list[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []
