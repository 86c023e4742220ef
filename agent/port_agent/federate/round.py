"""One round of a federation, on the device that leads it: `python -m port_agent.federate.round`, a process that lives as long as the round.

Its first request is a `RoundOrder`; what it sends and receives after that is `PeerGrid`'s. Its last event is how the round ended. The averaged weights take the place of the old ones at once and whole, so a round that is cut never was.
"""

import math
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError

import msgspec
import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
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
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

from port_agent.federate.grid import PeerGrid
from port_agent.federate.orders import (
    ARRAYS,
    GLOBAL_FILE,
    LOSS,
    MASKED_RANGE,
    MAX_WEIGHT,
    MESSAGES_FOLDER,
    SAMPLES,
    RoundEnded,
    RoundOrder,
)
from port_agent.federate.tensors import Arrays, FederatedTensorError, FederatedTensors, federated_tensors
from port_agent.federate.wire import FlowerMessageError, array_record, plain_arrays
from port_agent.system.helper_process import helper_exit_code, send_event
from port_planner.base.errors import PortError

_LEADER_NODE = 1
_MAX_SAMPLES = 1 << 40
"""What a device may say that it trained on."""


class RoundAbandonedError(PortError):
    """Too few devices replied; the weights stay what they were."""


class Round:
    """One round."""

    def __init__(self, order: RoundOrder, tensors: FederatedTensors) -> None:
        self._order, self._tensors = order, tensors
        folder = Path(order.folder)
        self._global = folder / GLOBAL_FILE
        check = self._check_masked if order.secure and not order.final else self._check
        self.grid = PeerGrid(order.run_id, order.nodes, order.goal, folder / MESSAGES_FOLDER, check)

    def run(self) -> tuple[int, float | None]:
        """Do the round; returns how many devices were averaged and their loss.

        Raises RoundAbandonedError, PortError, OSError.
        """
        arrays = self._tensors.read(self._global) if self._global.exists() else self._tensors.initial()
        if self._order.final:
            return self._hand_out(arrays), None
        averaged, count, loss = self._masked(arrays) if self._order.secure else self._plain(arrays)
        self._tensors.check(averaged)
        self._tensors.write(self._global, averaged)
        return count, loss

    def _plain(self, arrays: Arrays) -> tuple[Arrays, int, float | None]:
        """Average by FedAvg, with clipping and noise where the order says so."""
        order, grid = self._order, self.grid
        count = len(order.nodes)
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
        private = (
            DifferentialPrivacyClientSideFixedClipping(inner, order.noise, order.clip, count) if order.clip else None
        )
        strategy = private or inner
        messages = strategy.configure_train(order.number, array_record(arrays), ConfigRecord(), grid)
        replies = grid.send_and_receive(messages, timeout=order.timeout_s)
        self._require(len(replies))
        if private is not None:
            private.num_sampled_clients = len(replies)  # fewer devices need more noise
        averaged, metrics = strategy.aggregate_train(order.number, replies)
        if averaged is None or metrics is None:
            raise RoundAbandonedError("Flower averaged nothing")
        given = {name: array.astype(arrays[name].dtype) for name, array in plain_arrays(averaged).items()}
        return given, len(replies), _number(metrics.get(LOSS))

    def _masked(self, arrays: Arrays) -> tuple[Arrays, int, float | None]:
        """Average by SecAgg+: only the sum is seen here."""
        order, grid = self._order, self.grid
        manager = SimpleClientManager()
        for node in order.nodes:
            manager.register(GridClientProxy(node, grid, order.run_id))
        count = len(order.nodes)
        losses: list[float] = []

        def averaged_loss(metrics: list[tuple[int, Metrics]]) -> Metrics:
            losses.extend(float(str(one[LOSS])) for _, one in metrics)
            return {}

        strategy = MaskedFedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=count,
            min_available_clients=count,
            fit_metrics_aggregation_fn=averaged_loss,
        )
        context = LegacyContext(Context(order.run_id, _LEADER_NODE, {}, RecordDict(), {}), None, strategy, manager)
        before = recorddict_compat.parameters_to_arrayrecord(ndarrays_to_parameters(list(arrays.values())), True)
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: order.number})
        context.state.array_records[MAIN_PARAMS_RECORD] = before
        share = max(order.min_share, 0.5)
        workflow = SecAggPlusWorkflow(
            1.0, share, max_weight=MAX_WEIGHT, clipping_range=MASKED_RANGE, timeout=order.timeout_s
        )
        workflow(grid, context)
        after = context.state.array_records[MAIN_PARAMS_RECORD]
        if after is before:
            raise RoundAbandonedError("too few devices took part in all four stages of secure aggregation")
        self._require(len(losses))
        named = self._tensors.named(list(plain_arrays(after).values()))
        given = {name: array.astype(arrays[name].dtype) for name, array in named.items()}
        return given, len(losses), sum(losses) / len(losses) if losses else None

    def _hand_out(self, arrays: Arrays) -> int:
        """Give all devices the averaged weights; returns how many have them."""
        count = len(self._order.nodes)
        strategy = FedAvg(min_evaluate_nodes=count, min_available_nodes=count)
        messages = strategy.configure_evaluate(self._order.number, array_record(arrays), ConfigRecord(), self.grid)
        return len(self.grid.send_and_receive(messages, timeout=self._order.timeout_s))

    def _require(self, replied: int) -> None:
        """Raise RoundAbandonedError where fewer replied than are worth averaging."""
        asked = len(self._order.nodes)
        needed = max(1, math.ceil(self._order.min_share * asked))
        if replied < needed:
            reasons = "; ".join(f"{self._order.names[node]}: {why}" for node, why in self.grid.lost.items())
            raise RoundAbandonedError(f"{replied} of {asked} devices replied, {needed} are needed ({reasons})")

    def _check(self, reply: Message) -> None:
        """Raise FlowerMessageError for a reply that is not what training these tensors gives."""
        try:
            samples = reply.content.metric_records["metrics"][SAMPLES]
            if not isinstance(samples, int) or not 0 < samples < _MAX_SAMPLES:
                raise FlowerMessageError(f"it trained on {samples} samples")
            if not self._order.final:
                loss = reply.content.metric_records["metrics"][LOSS]
                if not isinstance(loss, float) or not math.isfinite(loss):
                    raise FlowerMessageError(f"its loss is {loss}")
                self._tensors.check(plain_arrays(reply.content.array_records[ARRAYS]))
            if set(reply.content.metric_records["metrics"]) - {SAMPLES, LOSS}:
                raise FlowerMessageError("it brings metrics that nobody asked for")
        except (KeyError, FederatedTensorError) as error:
            raise FlowerMessageError(f"not what was asked for: {error}") from error

    def _check_masked(self, reply: Message) -> None:
        """Raise FlowerMessageError for a reply whose masked sums have other sizes than these tensors, with the weight before them."""
        masked = reply.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord()).get(Masking.MASKED_PARAMETERS)
        if masked is None:
            return  # of another stage; Flower looks at these
        shapes = [(1,), *(tuple(layout.shape) for layout in self._tensors.layouts.values())]
        try:
            parts = masked if isinstance(masked, list) else []
            found = [bytes_to_ndarray(one) for one in parts if isinstance(one, bytes)]
        except (ValueError, TypeError, EOFError, OSError, SyntaxError, TokenError) as error:
            raise FlowerMessageError(f"masked sums cannot be read: {error}") from error
        if [one.shape for one in found if one.dtype == np.int64] != shapes:
            raise FlowerMessageError("masked sums of other sizes than its job's tensors")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def main(argv: Sequence[str]) -> int:
    """Do one round; returns the exit code, 0 also for one that was abandoned."""
    order = msgspec.json.decode(sys.stdin.readline(), type=RoundOrder)
    TaskIdentity.run_id, TaskIdentity.node_id = order.run_id, _LEADER_NODE
    TaskIdentity.task_id = secrets.randbits(62)

    def work() -> None:
        done = Round(order, federated_tensors(Path(order.bundle)))
        try:
            count, loss = done.run()
        except RoundAbandonedError as error:
            send_event(RoundEnded(abandoned=str(error)))
        else:
            lost = {order.names[node]: why for node, why in done.grid.lost.items()}
            send_event(RoundEnded(averaged=count, loss=loss, lost=lost))

    return helper_exit_code(work)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
