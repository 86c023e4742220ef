"""The answer of a device to one message of a federation:
`python -m port_agent.federate.client ORDER`, a short-lived process.

For a message that asks to train, it runs twice. First it writes the initial weights and no reply. The job's own worker
then trains, when and with the memory that the policy grants. Then it runs again with the result, and writes the reply.
Clipping and masking are Flower's own modifiers, chosen by the contents of the message.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common import recorddict_compat
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from port_agent.federate.masking import GuardedMasking, keep_change, kept_change, round_ranges, scaled
from port_agent.federate.orders import (
    ARRAYS,
    CONFIG,
    CONTEXT_FILE,
    EPSILON_BUDGET,
    EXPONENTS,
    LOSS,
    MAX_NOISE,
    MEASURED,
    MESSAGE_FILE,
    MODEL_FILE,
    NOISE,
    REPLY_FILE,
    RESULT_FILE,
    SAMPLES,
    START_FILE,
    ClientEnded,
    ClientOrder,
)
from port_agent.federate.privacy import PrivacyLedger
from port_agent.federate.signatures import DeviceSignatures
from port_agent.federate.tensors import Arrays, FederatedTensors, federated_tensors
from port_agent.federate.wire import (
    FlowerMessageError,
    array_record,
    flower_records,
    message_bytes,
    plain_arrays,
    read_message,
    records_bytes,
)
from port_agent.jobs.job import FederationTerms
from port_agent.peers.decoding import public_reason
from port_agent.peers.transfer import sha256_of
from port_agent.system.atomic_file import write_atomically
from port_agent.system.helper_process import helper_exit_code, send_event
from port_planner.base.errors import PortError
from port_planner.base.units import shown


class _TrainFirst(Exception):
    """The initial weights are written; the reply needs the result of training."""


class TermsError(PortError):
    """The owner of the job does not allow this round."""


class _Device:
    """This device as Flower sees it: `train` and `evaluate` of its client app."""

    def __init__(self, order: ClientOrder, tensors: FederatedTensors, ledger: PrivacyLedger) -> None:
        self._folder, self._samples, self._terms = Path(order.folder), order.samples, order.terms
        self._tensors, self._ledger = tensors, ledger
        self._message = sha256_of(self._folder / MESSAGE_FILE)
        self.contributed = ""
        """Form in which the reply contains the weights trained here."""

    def train(self, message: Message, context: Context) -> Message:
        """Return the trained weights for a message, after recording the privacy that they spend."""
        trained, weight = self._trained(plain_arrays(message.content.array_records[ARRAYS])), self._samples
        config, self.contributed = message.content.config_records[CONFIG], "unclipped, visible to the leader"
        self._spend(_noise_of(config), config)
        norm = _clipping_norm(config)
        if norm is not None:
            weight = 1  # the noise is for devices that count alike
            self.contributed = f"clipped to a norm of {norm:g}, visible to the leader"
        metrics = MetricRecord({SAMPLES: weight, LOSS: self._loss})
        return Message(RecordDict({ARRAYS: array_record(trained), "metrics": metrics}), reply_to=message)

    def measure(self, message: Message, context: Context) -> Message:
        """Train, store the change for the masked sum, and return only its size."""
        start = plain_arrays(message.content.array_records[ARRAYS])
        exponents = keep_change(context, start, self._trained(start), self._samples, self._loss)
        metrics = MetricRecord({SAMPLES: self._samples, LOSS: self._loss, EXPONENTS: exponents})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def contribute(self, message: Message, context: Context) -> Message:
        """Return the measured change in the records that Flower's masking reads."""
        given = recorddict_compat.recorddict_to_fitins(message.content, keep_input=True)
        start = self._tensors.named(parameters_to_ndarrays(given.parameters))
        self._spend(0.0, ConfigRecord())
        self.contributed = "masked"
        change, samples, loss = kept_change(context, start.values())
        shares = ndarrays_to_parameters(list(scaled(change, round_ranges(context))))
        result = FitRes(Status(Code.OK, ""), shares, samples, {LOSS: loss})
        return Message(recorddict_compat.fitres_to_recorddict(result, keep_input=True), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Store the averaged weights as the federation's result so far."""
        arrays = plain_arrays(message.content.array_records[ARRAYS])
        self._tensors.check(arrays)
        self._tensors.write(self._folder / MODEL_FILE, arrays)
        return Message(RecordDict({"metrics": MetricRecord({SAMPLES: self._samples})}), reply_to=message)

    def check_budget(self, config: ConfigRecord) -> None:
        """Raise BudgetSpentError if answering a message would spend more privacy than the
        owner or the leader allows.
        """
        self._ledger.check(_noise_of(config), self._message, self._budget(config))

    def _spend(self, noise: float, config: ConfigRecord) -> None:
        """Record a contribution. The data may have spent privacy for another job meanwhile. Raises BudgetSpentError."""
        self._ledger.spend(noise, self._message, self._budget(config))

    def _budget(self, config: ConfigRecord) -> float:
        budgets = (self._terms.epsilon_budget, config.get(EPSILON_BUDGET))
        return min((one for one in budgets if isinstance(one, float)), default=math.inf)

    def _trained(self, arrays: Arrays) -> Arrays:
        """Return the trained weights; raises _TrainFirst if they do not exist yet, FederatedTensorError."""
        self._tensors.check(arrays)
        if not (self._folder / RESULT_FILE).exists():
            self._tensors.write(self._folder / START_FILE, arrays)
            raise _TrainFirst
        return self._tensors.read(self._folder / RESULT_FILE)

    @property
    def _loss(self) -> float:
        """Return the last loss, which the supervisor wrote next to the result."""
        try:
            return float((self._folder / RESULT_FILE).with_suffix(".loss").read_text())
        except (FileNotFoundError, ValueError):
            return 0.0


def _noise_of(config: ConfigRecord) -> float:
    """Return the noise that the leader claims to add to clipped changes; 0 for none.

    Raises FlowerMessageError for a value that a leader cannot set.
    """
    noise = config.get(NOISE)
    if _clipping_norm(config) is None or not isinstance(noise, float) or not noise > 0:
        return 0.0
    if noise > MAX_NOISE:
        raise FlowerMessageError(f"its noise is {noise:g} times the norm; at most {MAX_NOISE:g} is accepted")
    return noise


def _clipping_norm(config: ConfigRecord) -> float | None:
    """Return the norm to which a message clips changes; None without clipping.

    Raises FlowerMessageError for a norm that clips nothing.
    """
    norm = config.get(KEY_CLIPPING_NORM)
    if norm is not None and not (isinstance(norm, float) and 0 < norm < math.inf):
        raise FlowerMessageError(f"its clipping norm is {norm!r}, not a finite number above 0")
    return norm


def client_app(device: _Device, message: Message, terms: FederationTerms, state_dir: Path) -> ClientApp:
    """Return the app that answers a message, with the modifiers that the message requires.

    Raises TermsError if the owner does not allow it, FlowerMessageError for a message that no leader sends.
    """
    app = ClientApp()
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    if message.metadata.message_type == MessageType.TRAIN:
        _check_terms(message, config, terms)
    elif message.metadata.message_type != MessageType.EVALUATE:  # Flower takes more names for the same
        raise FlowerMessageError(f"a leader sends no messages of type {shown(message.metadata.message_type)}")
    if RECORD_KEY_CONFIGS in message.content.config_records:
        app.train(mods=[GuardedMasking(DeviceSignatures(state_dir))])(device.contribute)
    elif MEASURED in config:
        app.train()(device.measure)
    else:
        app.train(mods=[fixedclipping_mod] if KEY_CLIPPING_NORM in config else [])(device.train)
    app.evaluate()(device.evaluate)
    return app


def _check_terms(message: Message, config: ConfigRecord, terms: FederationTerms) -> None:
    masked = RECORD_KEY_CONFIGS in message.content.config_records or MEASURED in config
    if terms.require_secure and not masked:
        raise TermsError("its owner only allows contributions to masked sums; lead with --secure")
    norm = None if masked else _clipping_norm(config)  # what is masked is not clipped
    if terms.require_clip is not None and (norm is None or norm > terms.require_clip):
        raise TermsError(
            f"its owner requires changes clipped to a norm of {terms.require_clip:g} or less; lead with --clip"
        )


def answer_message(order: ClientOrder) -> ClientEnded:
    """Write the reply to the message in a directory, unless training must come first; return the outcome.

    Raises PortError for a bundle or a message that cannot be read, OSError.
    """
    folder, state_dir, terms = Path(order.folder), Path(order.state_dir), order.terms
    message = read_message((folder / MESSAGE_FILE).read_bytes())
    metadata = message.metadata
    context = Context(metadata.run_id, metadata.dst_node_id, {}, flower_records(folder / CONTEXT_FILE), {})
    device = _Device(order, federated_tensors(Path(order.bundle)), PrivacyLedger(state_dir, order.data))
    try:
        if metadata.message_type == MessageType.TRAIN and not (folder / RESULT_FILE).exists():
            device.check_budget(message.content.config_records.get(CONFIG, ConfigRecord()))
        reply = client_app(device, message, terms, state_dir)(message, context)
        write_atomically(folder / CONTEXT_FILE, records_bytes(context.state))
    except _TrainFirst:
        return ClientEnded(trains_first=True)
    except (
        PortError,
        KeyError,
        ValueError,  # msgspec's, too, for a damaged ledger
        TypeError,
    ) as error:  # what Flower's modifiers raise for a message out of turn
        reason = public_reason(error)
        if not isinstance(error, PortError):
            reason = f"{type(error).__name__}: {reason}"  # alone, a KeyError is a word without sense
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        ended = ClientEnded(refused=public_reason(error))
    else:
        ended = ClientEnded(contributed=device.contributed)
    write_atomically(folder / REPLY_FILE, message_bytes(reply))
    return ended


def main(argv: Sequence[str]) -> int:
    """Answer a message by the JSON order; return the exit code."""
    (order,) = argv
    return helper_exit_code(lambda: send_event(answer_message(msgspec.json.decode(order, type=ClientOrder))))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
