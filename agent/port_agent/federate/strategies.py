"""How the leader applies an average, by Flower's strategies: unchanged, or as a step of a server-side optimizer.

A strategy object lives for one round, like its process. Its state from earlier rounds is in a file with the round's
number, so that an interrupted round begins with the same state.
"""

from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx
from numpy.typing import NDArray

from port_agent.federate.orders import RoundOrder, ServerStrategy, StrategySettings, server_file
from port_agent.federate.tensors import Arrays
from port_agent.federate.wire import plain_arrays
from port_agent.system.atomic_file import atomic_stream

_FIRST, _SECOND = "first", "second"
"""Names of the moments; FedAvgM has only the first, its momentum."""
_Moments = dict[str, dict[str, NDArray[np.generic]]]


class ServerStep:
    """The strategy of one round, and its state."""

    def __init__(self, order: RoundOrder) -> None:
        """Load the state of the previous round; raises OSError, ValueError for a damaged file."""
        self._order, self._folder = order, Path(order.folder)
        self.strategy = _strategy(order.server, len(order.nodes))
        if order.number > 1 and not order.server.strategy.keeps_average:
            self._give(_read(self._folder / server_file(order.number - 1)))

    def average(self, start: Arrays, replies: list[Message]) -> tuple[Arrays | None, MetricRecord | None]:
        """Return the weights after the round, and the metrics; raises OSError.

        If the optimizer's step would make a tensor without negative numbers negative, such as a running variance,
        its plain average is used.
        """
        averaged, metrics = self.strategy.aggregate_train(self._order.number, replies)
        if averaged is None or self._order.server.strategy.keeps_average:
            return None if averaged is None else plain_arrays(averaged), metrics
        stepped = plain_arrays(averaged)
        plain, _ = _strategy(StrategySettings(), len(replies)).aggregate_train(self._order.number, replies)
        for name, array in plain_arrays(plain or ArrayRecord()).items():
            if stepped[name].min(initial=0.0) < 0.0 <= min(array.min(initial=0.0), start[name].min(initial=0.0)):
                stepped[name] = array
        _write(self._folder / server_file(self._order.number), self._remembered(start))
        return stepped, metrics

    def _give(self, moments: _Moments) -> None:
        match self.strategy:
            case FedAvgM():
                self.strategy.momentum_vector = list(moments[_FIRST].values())
            case FedAdam():
                self.strategy.m_t, self.strategy.v_t = moments[_FIRST], moments[_SECOND]

    def _remembered(self, start: Arrays) -> _Moments:
        match self.strategy:
            case FedAvgM():
                vector = self.strategy.momentum_vector or [np.zeros_like(array) for array in start.values()]
                return {_FIRST: dict(zip(start, vector, strict=True))}
            case FedAdam():
                return {_FIRST: self.strategy.m_t or {}, _SECOND: self.strategy.v_t or {}}
        return {}


def _strategy(server: StrategySettings, count: int) -> FedAvg:
    match server.strategy:
        case ServerStrategy.FEDAVGM:
            made: FedAvg = FedAvgM(
                server_learning_rate=server.rate,
                server_momentum=server.momentum,
                fraction_evaluate=0.0,
                min_train_nodes=count,
                min_available_nodes=count,
            )
        case ServerStrategy.FEDADAM:
            made = FedAdam(
                eta=server.rate,
                beta_1=server.betas[0],
                beta_2=server.betas[1],
                tau=server.tau,
                fraction_evaluate=0.0,
                min_train_nodes=count,
                min_available_nodes=count,
            )
        case ServerStrategy.FEDPROX:
            made = FedProx(
                proximal_mu=server.proximal_mu, fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count
            )
        case ServerStrategy.FEDAVG:
            made = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    return made


def _write(path: Path, moments: _Moments) -> None:
    flat = {f"{kind}/{name}": array for kind, arrays in moments.items() for name, array in arrays.items()}
    with atomic_stream(path, sum(array.nbytes for array in flat.values())) as stream:
        np.savez(stream, allow_pickle=False, **flat)


def _read(path: Path) -> _Moments:
    moments: _Moments = {_FIRST: {}, _SECOND: {}}
    with np.load(path, allow_pickle=False) as archive:
        for key in archive.files:
            kind, _, name = key.partition("/")
            moments[kind][name] = archive[key]
    return moments
