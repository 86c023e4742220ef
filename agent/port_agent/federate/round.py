"""One round of a federation, on the device that leads it: `python -m port_agent.federate.round`, a process that
lives as long as the round.

Its first request is a `RoundOrder`; later messages are those of `PeerGrid`. Its last event reports how the round ended.
The averaged weights are a file that exists whole or not at all, next to the one with which the round began. The
supervisor records which of them counts, so an interrupted round has no effect.
"""

import math
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

from port_agent.federate.grid import PeerGrid
from port_agent.federate.masked_average import LEADER_NODE, MaskedAverage
from port_agent.federate.orders import (
    ARRAYS,
    EPSILON_BUDGET,
    LOSS,
    MESSAGES_FOLDER,
    NOISE,
    SAMPLES,
    RoundEnded,
    RoundOrder,
    global_file,
)
from port_agent.federate.replies import (
    RoundAbandonedError,
    check_average,
    check_metrics,
    check_records,
    require_replies,
    too_large,
)
from port_agent.federate.strategies import ServerStep
from port_agent.federate.tensors import Arrays, FederatedTensorError, FederatedTensors, federated_tensors
from port_agent.federate.wire import FlowerMessageError, array_record, plain_arrays
from port_agent.system.helper_process import helper_exit_code, send_event

_CLIPPED = 1.001
"""Factor by which a clipped change may exceed the norm, because devices clip in 32 bits."""

_VARIANCE = "running_var"
"""Name of the running variance in torch's normalisation layers."""


class Round:
    """One round."""

    def __init__(self, order: RoundOrder, tensors: FederatedTensors) -> None:
        self._order, self._tensors = order, tensors
        folder = Path(order.folder)
        self._begun, self._averaged = (folder / global_file(number) for number in (order.number - 1, order.number))
        self._start: Arrays = {}
        self._sizes: dict[int, float] = {}
        """Norms of the changes, by node."""
        self._samples: dict[int, int] = {}
        self.grid = PeerGrid(order.run_id, order.nodes, order.goal, folder / MESSAGES_FOLDER, self._check)

    def run(self) -> tuple[int, float | None]:
        """Run the round; return the number of averaged devices, and their loss.

        Raises RoundAbandonedError, PortError, OSError.
        """
        arrays = self._tensors.read(self._begun) if self._order.number > 1 else self._tensors.initial()
        if self._order.final:
            return self._hand_out(arrays), None
        self._start = arrays
        averaged, count, loss = self._masked(arrays) if self._order.secure else self._plain(arrays)
        if self._order.secure or self._order.noise:
            averaged = without_negative_variances(averaged, arrays if self._order.noise else None)
        try:
            self._tensors.check(averaged)
        except FederatedTensorError as error:
            raise RoundAbandonedError(f"the averaged weights cannot be used: {error}") from error
        self._tensors.write(self._averaged, averaged)
        return count, loss

    def _masked(self, arrays: Arrays) -> tuple[Arrays, int, float | None]:
        """Average by SecAgg+, where only the sum of changes is visible."""
        masked = MaskedAverage(self._order, self._tensors, self.grid)
        self.grid.check, self.grid.amend = masked.check, masked.amend
        return masked.average(arrays)

    def _plain(self, arrays: Arrays) -> tuple[Arrays, int, float | None]:
        """Average by the order's strategy, with clipping and noise if the order requires them."""
        order, grid, step = self._order, self.grid, ServerStep(self._order)
        private = (
            DifferentialPrivacyClientSideFixedClipping(step.strategy, order.noise, order.clip, len(order.nodes))
            if order.clip
            else None
        )
        begin = (private or step.strategy).configure_train
        messages = begin(order.number, array_record(arrays), self._private_terms(), grid)
        replies = grid.send_and_receive(messages, timeout=order.timeout_s)
        wrong = too_large("change", self._sizes) | too_large("number of samples", self._samples)
        grid.lost.update(wrong)
        replies = [reply for reply in replies if reply.metadata.src_node_id not in wrong]
        require_replies(len(replies), order, grid.lost)
        replies.sort(
            key=lambda reply: reply.metadata.src_node_id
        )  # so that sums have the same bits whichever reply was first
        if private is not None:
            private.num_sampled_clients = len(replies)  # fewer devices need more noise
            noisy, metrics = private.aggregate_train(order.number, replies)
            averaged = None if noisy is None else plain_arrays(noisy)
        else:
            averaged, metrics = step.average(arrays, replies)
        if averaged is None or metrics is None:
            raise RoundAbandonedError("Flower returned no average")
        given: Arrays = {name: array.astype(arrays[name].dtype) for name, array in averaged.items()}
        if order.server.strategy.keeps_average and not order.noise:
            check_average(given, replies)
        return given, len(replies), _number(metrics.get(LOSS))

    def _private_terms(self) -> ConfigRecord:
        """Return the description of the noise that devices receive."""
        order = self._order
        if not order.clip:
            return ConfigRecord()
        budget = {} if order.epsilon_budget is None else {EPSILON_BUDGET: order.epsilon_budget}
        return ConfigRecord({NOISE: order.noise, **budget})

    def _hand_out(self, arrays: Arrays) -> int:
        """Send the averaged weights to all devices; return how many have them."""
        count = len(self._order.nodes)
        strategy = FedAvg(min_evaluate_nodes=count, min_available_nodes=count)
        messages = strategy.configure_evaluate(self._order.number, array_record(arrays), ConfigRecord(), self.grid)
        return len(self.grid.send_and_receive(messages, timeout=self._order.timeout_s))

    def _check(self, asked: Message, reply: Message) -> None:
        """Raise FlowerMessageError for a reply that cannot result from training these tensors as ordered."""
        if self._order.final:
            check_records(reply)
            check_metrics(reply)
            return
        check_records(reply, ARRAYS)
        samples, arrays = check_metrics(reply, LOSS)[SAMPLES], plain_arrays(reply.content.array_records[ARRAYS])
        try:
            self._tensors.check(arrays)
        except FederatedTensorError as error:
            raise FlowerMessageError(f"not the requested reply: {error}") from error
        size, rounding = _change(self._start, arrays)
        if self._order.clip and (samples != 1 or size > self._order.clip * _CLIPPED + rounding):
            raise FlowerMessageError(
                f"its change has a norm of {size:.3g} and a weight of {samples}, not at most {self._order.clip:g} and 1"
            )
        node = asked.metadata.dst_node_id
        self._sizes[node], self._samples[node] = size, int(str(samples))


def _change(start: Arrays, trained: Arrays) -> tuple[float, float]:
    """Return the norm of a change of weights, and the bound of its error by the rounding of trained weights."""
    squares = rounding = 0.0
    for name, array in trained.items():
        squares += float(np.square(np.subtract(array, start[name], dtype=np.float64)).sum())
        rounding += float(np.square(np.spacing(np.abs(array)), dtype=np.float64).sum())
    return math.sqrt(squares), math.sqrt(rounding)


def without_negative_variances(averaged: Arrays, before: Arrays | None) -> Arrays:
    """Return averaged weights in which no running variance is negative, because its root would not be a number.

    `before`: earlier weights, whose variances replace those that noise made negative. Without noise, a step of a masked
    sum was the cause, and such variances become zero.
    """
    kept = dict(averaged)
    for name in averaged:
        if name.rpartition(".")[2] == _VARIANCE:
            instead = np.zeros((), averaged[name].dtype) if before is None else before[name]
            kept[name] = np.where(np.less(averaged[name], 0), instead, averaged[name])
    return kept


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def main(argv: Sequence[str]) -> int:
    """Run one round; return the exit code, which is 0 also for an abandoned round."""
    order = msgspec.json.decode(sys.stdin.readline(), type=RoundOrder)
    TaskIdentity.run_id, TaskIdentity.node_id = order.run_id, LEADER_NODE
    TaskIdentity.task_id = secrets.randbits(62)  # in every message and its reply: no other round has it

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
