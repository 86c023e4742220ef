"""What the supervisor and Flower's processes share: files, names of records, what a round is told. Without Flower, and light."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from port_agent.jobs.job import FederationTerms
from port_agent.peers.decoding import LONGEST_ROUND_S

FOLDER = "federation"
"""In a job's directory: what it does in a federation that another device, or this one, leads."""
MESSAGE_FILE, REPLY_FILE = "message", "reply"
START_FILE, RESULT_FILE = "start.safetensors", "result.safetensors"
"""The weights that a round begins with, and what training made of them."""
RESULT_PART_FILE = "result.part"
"""What a fine-tuning's worker, which has no rights in this folder, writes the same to; the supervisor gives it its name."""
MODEL_FILE = "model.safetensors"
"""What was averaged last, as this device was told. Of a fine-tuning, only until its worker has made the adapter's directory of it."""
CONTEXT_FILE = "context"
"""What Flower's modifiers keep from one message of a round to the next."""
LEADER_FOLDER = "leader"
"""In a job's directory: what this device keeps of a federation that it leads."""
MESSAGES_FOLDER = "messages"
"""There: messages of the round on their way, and replies."""
STATE_FOLDER = "state"
"""In the folder of a federation: the worker's checkpoints in this round."""

ARRAYS, CONFIG = "arrays", "config"
"""The records of a message: Flower's own defaults."""
SAMPLES, LOSS = "num-examples", "loss"
"""The metrics of a reply."""

MEASURED, EXPONENTS = "measured-change", "change-exponents"
"""Of a secure round's first message, which asks for the sizes of a change alone; and by tensor, the least e with |change| <= 2^e."""
NOISE, EPSILON_BUDGET = "noise-multiplier", "epsilon-budget"
"""Of a message that has changes clipped: the noise that the leader adds to their average, and what the data of each device may spend."""
FEWEST_MASKED = 3
"""Contributions in a masked sum: of two, each contributor knows the other's."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


def global_file(rounds: int) -> str:
    """Return the name of the leader's weights after so many rounds: a round that is cut before it is noted begins where it began."""
    return f"global-{rounds}.safetensors"


def server_file(rounds: int) -> str:
    """Return the name of what the leader's strategy remembers after so many rounds."""
    return f"server-{rounds}.npz"


def has_round(folder: Path) -> bool:
    """Return whether a round is to be trained in the folder of a federation."""
    return (folder / START_FILE).exists() and not (folder / RESULT_FILE).exists()


class ServerStrategy(StrEnum):
    """What the leader makes of an average, by Flower's names."""

    FEDAVG = "fedavg"
    """Takes it as it is."""
    FEDAVGM = "fedavgm"
    """Goes on from it with momentum (Hsu et al. 2019, arXiv 1909.06335)."""
    FEDADAM = "fedadam"
    """Adam, the average change being its gradient (Reddi et al. 2020, arXiv 2003.00295)."""


_Factor = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class StrategySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's strategy and its numbers."""

    strategy: ServerStrategy = ServerStrategy.FEDAVG
    rate: Annotated[float, msgspec.Meta(gt=0.0, le=1e3)] = 1.0
    momentum: _Factor = 0.9
    """Of FedAvgM."""
    betas: tuple[_Factor, _Factor] = (0.9, 0.99)
    """Of FedAdam."""
    tau: Annotated[float, msgspec.Meta(gt=0.0, le=1e3)] = 1e-3
    """Of FedAdam: added to the root of its second moment."""


class FederationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    rounds: _Count
    min_devices: _Count = 2
    """So many must be ready before a round begins, this one among them."""
    goal: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """So many replies end a round; 0: all that were asked."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_ROUND_S)] = 3600.0
    min_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.5
    """Of those asked, so many must have replied, or the round is abandoned."""
    clip: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    noise: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    epsilon_budget: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] | None = None
    """What each device's data may have spent over its life, this federation's rounds among it."""
    secure: bool = False
    server: StrategySettings = StrategySettings()


class RoundOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One round: who takes part, when it is over, and how is averaged."""

    run_id: int
    number: int
    """Of the round, from 1."""
    folder: str
    """Where the leader keeps the averaged weights, and messages on their way."""
    bundle: str
    names: dict[int, str]
    """The devices, by their number among Flower's nodes."""
    goal: int
    timeout_s: float
    min_share: float
    clip: float = 0.0
    """The norm that a device's change is clipped to; 0: not at all."""
    noise: float = 0.0
    """Noise multiplier of the Gaussian mechanism."""
    epsilon_budget: float | None = None
    secure: bool = False
    final: bool = False
    """Nothing is trained: all get the averaged weights."""
    server: StrategySettings = StrategySettings()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The devices' numbers."""
        return tuple(self.names)


class TensorsOf(msgspec.Struct, frozen=True):
    """What of a job is federated, and what it trains on."""

    fingerprint: str
    nbytes: int
    data: str
    """A hash of what the job trains on."""
    samples: int
    """Of that."""


class ClientOrder(msgspec.Struct, frozen=True):
    """What a device's client is told beside the message: the job's bundle or file, and what is federated of it."""

    folder: str
    """Where the message lies."""
    bundle: str
    state_dir: str
    """Where this device's key lies, and the certificates of those it is paired with."""
    data: str
    samples: int
    """As in `TensorsOf`."""
    terms: FederationTerms = FederationTerms()


class ClientEnded(msgspec.Struct, frozen=True, kw_only=True):
    """What a client made of a message, for the history of its owner."""

    trains_first: bool = False
    """It wrote what training begins with, and no reply yet."""
    contributed: str = ""
    """How what was trained here is in its reply; "": it is not."""
    refused: str = ""
    """Why its reply has nothing but this."""


class MessageReady(msgspec.Struct, frozen=True, tag_field="event", tag="send"):
    """Of the round's process: a message for a device lies in `file` of the messages' folder."""

    node: int
    file: str


class RepliesUnneeded(msgspec.Struct, frozen=True, tag_field="event", tag="forget"):
    """Likewise: nobody waits for the replies of these devices any more."""

    nodes: tuple[int, ...]


class RoundEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ended"):
    """Likewise, the last: so many devices were averaged, or the round was abandoned for a reason."""

    averaged: int = 0
    loss: float | None = None
    abandoned: str = ""
    lost: dict[str, str] = {}
    """Devices whose reply is not in it, and why."""


RoundEvent = MessageReady | RepliesUnneeded | RoundEnded


class ReplyReport(msgspec.Struct, frozen=True, kw_only=True):
    """To the round's process: the reply to the message in `file` lies in the file `reply`, or there is none because it `failed`."""

    node: int
    file: str
    reply: str = ""
    failed: str = ""
