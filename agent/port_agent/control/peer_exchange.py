"""Questions of the command line to paired devices, through the agent that runs here."""

import base64
from typing import Any
from urllib.parse import quote

import msgspec

from port_agent.control.client import ControlClient, ControlError
from port_agent.peers.decoding import REASON_LIMIT
from port_agent.peers.exchange.answers import ANSWER_S, NotAnsweredError, PeerContent, Topic, solving_patience_s

_AGENT_S = 15.0
"""Seconds that the agents at both ends may take in addition."""


class PeerExchange:
    """Questions to paired devices; each method raises NotAnsweredError, also where no agent runs here."""

    def __init__(self, client: ControlClient, on: str) -> None:
        """`on` is a device's name or id, or `any`."""
        self._folder, self._on = client.path.parent, quote(on, safe="")

    def shared(self, topic: Topic, name: str) -> PeerContent:
        """Return the content that paired devices share under a name, from whichever device has it."""
        return _content(self._sent("GET", f"/v1/shared/{topic.value}/{name}", None, ANSWER_S))

    def solved(self, name: str, problem: bytes, seconds: float) -> PeerContent:
        """Return a paired device's answer to a planning problem, for which its solver gets `seconds` of CPU time."""
        path = f"/v1/solve/{name}?on={self._on}&seconds={seconds:.3f}"
        return _content(self._sent("PUT", path, problem, 2 * ANSWER_S + solving_patience_s(seconds)))

    def share(self, topic: Topic, name: str, content: bytes) -> None:
        """Share content with paired devices."""
        self._sent("PUT", f"/v1/shared/{topic.value}/{name}", content, ANSWER_S)

    def accuse(self, device: str, reason: str) -> None:
        """Make the agent block a device temporarily because it gave a wrong answer."""
        body = msgspec.json.encode({"device": device, "reason": reason[:REASON_LIMIT]})
        self._sent("POST", "/v1/peers/cut", body, ANSWER_S)

    def _sent(self, method: str, path: str, body: bytes | None, patience_s: float) -> Any:
        try:
            return ControlClient(self._folder, patience_s + _AGENT_S).send(method, path, body)
        except ControlError as error:
            raise NotAnsweredError(str(error)) from error


def _content(answer: Any) -> PeerContent:
    return PeerContent(answer["device"], answer["name"], base64.b64decode(answer["content"]))
