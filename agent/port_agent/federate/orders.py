"""What the supervisor and Flower's processes share: files, names of records, and settings of a round.

It loads little, and not Flower.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from port_agent.jobs.job import FederationTerms
from port_agent.peers.decoding import LONGEST_ROUND_S

FOLDER = "federation"
"""Folder in a job's directory, with files of a federation that another device, or this one, leads."""
MESSAGE_FILE, REPLY_FILE = "message", "reply"
START_FILE, RESULT_FILE = "start.safetensors", "result.safetensors"
"""Names of the files with a round's initial weights, and with the trained ones."""
RESULT_PART_FILE = "result.part"
"""Name of the same file while a fine-tuning's worker writes it, which may not write to this directory;
the supervisor renames it.
"""
MODEL_FILE = "model.safetensors"
"""Name of the file with the last average, as received by this device.

For a fine-tuning, it exists only until its worker has made the adapter's directory from it.
"""
CONTEXT_FILE = "context"
"""Name of the file with the state that Flower's modifiers keep between the messages of a round."""
LEADER_FOLDER = "leader"
"""Folder in a job's directory with the files of a federation that this device leads."""
MESSAGES_FOLDER = "messages"
"""Folder below it with the round's messages in transit, and replies."""
STATE_FOLDER = "state"
"""Folder in that of a federation, with the worker's checkpoints in this round."""

ARRAYS, CONFIG = "arrays", "config"
"""Names of the records of a message, Flower's own defaults."""
SAMPLES, LOSS = "num-examples", "loss"
"""Names of the metrics of a reply."""

MEASURED, EXPONENTS = "measured-change", "change-exponents"
"""Keys of a secure round's first message, which asks only for the sizes of a change, and of its answer. The answer has,
by tensor, the least e with |change| <= 2^e.
"""
NOISE, EPSILON_BUDGET = "noise-multiplier", "epsilon-budget"
"""Keys of a message that requires clipped changes: the noise that the leader adds to their average, and the privacy
budget of each device's data.
"""
LATE = "no reply in time"
"""Reason given for a device whose reply came after the end of its round."""
MAX_NOISE = 1e6
"""The largest noise multiplier."""
FEWEST_MASKED = 3
"""Least number of contributions in a masked sum; of two, each contributor knows the other's."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


def global_file(rounds: int) -> str:
    """Return the name of the leader's weights after `rounds` rounds.

    A round that is interrupted before it is recorded begins with the same.
    """
    return f"global-{rounds}.safetensors"


def server_file(rounds: int) -> str:
    """Return the name of the strategy's state after `rounds` rounds."""
    return f"server-{rounds}.npz"


def has_round(folder: Path) -> bool:
    """Return whether a round must be trained in the folder of a federation."""
    return (folder / START_FILE).exists() and not (folder / RESULT_FILE).exists()


class ServerStrategy(StrEnum):
    """How the leader applies an average, by Flower's names."""

    FEDAVG = "fedavg"
    """Use the average unchanged."""
    FEDPROX = "fedprox"
    """Federated averaging in which each device's loss has a proximal term (Li et al. 2020, arXiv 1812.06127)."""
    FEDAVGM = "fedavgm"
    """Continue from the average with momentum (Hsu et al. 2019, arXiv 1909.06335)."""
    FEDADAM = "fedadam"
    """Adam with the average change as its gradient (Reddi et al. 2020, arXiv 2003.00295)."""

    @property
    def keeps_average(self) -> bool:
        """Whether the average is the result, with no state kept for the next round."""
        return self in (ServerStrategy.FEDAVG, ServerStrategy.FEDPROX)


_Factor = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class StrategySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's strategy and its numbers."""

    strategy: ServerStrategy = ServerStrategy.FEDAVG
    rate: Annotated[float, msgspec.Meta(gt=0.0, le=1e3)] = 1.0
    momentum: _Factor = 0.9
    """Server momentum of FedAvgM."""
    betas: tuple[_Factor, _Factor] = (0.9, 0.99)
    """Decay rates of FedAdam's two moments."""
    tau: Annotated[float, msgspec.Meta(gt=0.0, le=1e3)] = 1e-3
    """Number that FedAdam adds to the root of its second moment."""
    proximal_mu: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    """Factor of FedProx's term, the same in all devices' jobs."""


class FederationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The requested settings."""

    rounds: _Count
    min_devices: _Count = 2
    """Number of devices that must be ready before a round begins, including this one."""
    goal: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """Number of replies that end a round; 0: all devices that were asked."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_ROUND_S)] = 3600.0
    min_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.5
    """Share of the asked devices that must have replied; otherwise the round is abandoned."""
    clip: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    noise: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_NOISE)] = 0.0
    epsilon_budget: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] | None = None
    """Epsilon that each device's data may spend over its life, including this federation's rounds."""
    secure: bool = False
    server: StrategySettings = StrategySettings()


class RoundOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One round: the participants, the time of its end, and how to average."""

    run_id: int
    number: int
    """Number of the round, from 1."""
    folder: str
    """Directory of the averaged weights and of messages in transit."""
    bundle: str
    names: dict[int, str]
    """Names of the devices, by their number among Flower's nodes."""
    goal: int
    timeout_s: float
    min_share: float
    clip: float = 0.0
    """The norm to which a device's change is clipped; 0: no clipping."""
    noise: float = 0.0
    """Noise multiplier of the Gaussian mechanism."""
    epsilon_budget: float | None = None
    secure: bool = False
    final: bool = False
    """Whether this round only sends the averaged weights to all devices, without training."""
    server: StrategySettings = StrategySettings()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The devices' numbers."""
        return tuple(self.names)


class TensorsOf(msgspec.Struct, frozen=True):
    """The federated tensors of a job, and its training data."""

    fingerprint: str
    nbytes: int
    data: str
    """A hash of the job's training data."""
    samples: int
    """Number of its samples."""


class ClientOrder(msgspec.Struct, frozen=True):
    """A client's order besides the message: the job's bundle or file, and its federated tensors."""

    folder: str
    """Directory of the message."""
    bundle: str
    state_dir: str
    """Directory of this device's key and of the certificates of its paired devices."""
    data: str
    samples: int
    """Samples, as in `TensorsOf`."""
    terms: FederationTerms = FederationTerms()


class ClientEnded(msgspec.Struct, frozen=True, kw_only=True):
    """What a client did with a message, for its owner's history."""

    trains_first: bool = False
    """Whether the device wrote the initial weights, but no reply yet."""
    contributed: str = ""
    """Form in which the reply contains the weights trained here; "" if it does not contain them."""
    refused: str = ""
    """Why its reply contains nothing but this reason."""


class MessageReady(msgspec.Struct, frozen=True, tag_field="event", tag="send"):
    """Event of the round's process: a message for a device is in `file` of the messages' directory."""

    node: int
    file: str


class RepliesUnneeded(msgspec.Struct, frozen=True, tag_field="event", tag="forget"):
    """An event: the replies of these devices are no longer needed."""

    nodes: tuple[int, ...]


class RoundEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ended"):
    """The last event: `devices` devices were averaged, or the round was abandoned for a reason."""

    averaged: int = 0
    loss: float | None = None
    abandoned: str = ""
    lost: dict[str, str] = {}
    """Devices without a reply, and why."""


RoundEvent = MessageReady | RepliesUnneeded | RoundEnded


class ReplyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Message to the round's process: the reply to the message in `file` is in the file `reply`, or there is
    none because it `failed`.
    """

    node: int
    file: str
    reply: str = ""
    failed: str = ""
