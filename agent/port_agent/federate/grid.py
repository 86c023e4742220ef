"""Flower's grid over paired devices: its messages go to the supervisor, which delivers them and fetches replies."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import msgspec
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from port_agent.federate.orders import LATE, MessageReady, RepliesUnneeded, ReplyReport
from port_agent.federate.wire import FlowerMessageError, message_bytes, read_message
from port_agent.system.helper_process import requests, send_event
from port_planner.base.errors import PortError


class GridClosedError(PortError):
    """Nobody delivers messages any more."""


class PeerGrid(Grid):
    """The devices of one round; messages wait in files of `folder`, which the supervisor reads.

    `goal`: number of replies that are enough. Devices that have not replied by then, or within a message's
    time, are not waited for.
    """

    def __init__(
        self, run_id: int, nodes: Iterable[int], goal: int, folder: Path, check: Callable[[Message, Message], None]
    ) -> None:
        """`check`, which may be replaced, receives the request and the reply; it raises FlowerMessageError
        for an unacceptable reply.
        """
        self.amend: Callable[[Message], None] = lambda message: None
        """Function that changes a message before it is sent; may be replaced."""
        self._run = Run.create_empty(run_id)
        self._nodes, self._goal, self._folder, self.check = tuple(nodes), goal, folder, check
        self._reports: queue.Queue[ReplyReport | None] = queue.Queue()
        """Reports of replies; None at the end, when the process that delivers messages has ended."""
        self._sent = 0
        self.lost: dict[int, str] = {}
        """Devices without an acceptable reply, and why."""
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def run(self) -> Run:
        """The run to which the messages belong."""
        return self._run

    def set_run(self, run: Run) -> None:
        """Use another run."""
        self._run = run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to a device."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the devices that take part."""
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        """Raise, because the sender here also waits for the replies."""
        raise NotImplementedError("single messages are not supported; use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> NoReturn:
        """Raise as `push_messages` does."""
        raise NotImplementedError("single messages are not supported; use send_and_receive")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the acceptable replies that came in time, once there are enough. Raises GridClosedError."""
        asked = {message.metadata.dst_node_id: message for message in messages}
        for message in asked.values():
            self.amend(message)
        waiting = {node: self._send(message) for node, message in asked.items()}
        end_s = time.monotonic() + timeout if timeout is not None else None
        replies: list[Message] = []
        while waiting and len(replies) < self._goal:
            try:
                report = self._reports.get(timeout=None if end_s is None else max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                break
            if report is None:
                raise GridClosedError("the agent that delivers its messages is gone; it starts this round again")
            if waiting.get(report.node) == report.file:
                del waiting[report.node]
                replies += self._reply(report, asked[report.node])
        for node in waiting:
            self.lost[node] = LATE if len(replies) < self._goal else "enough others replied before"
        send_event(RepliesUnneeded(tuple(sorted(waiting))))
        return replies

    def _send(self, message: Message) -> str:
        self._sent += 1
        file = f"{message.metadata.dst_node_id}-{self._sent}"
        (self._folder / file).write_bytes(message_bytes(message))
        send_event(MessageReady(message.metadata.dst_node_id, file))
        return file

    def _reply(self, report: ReplyReport, asked: Message) -> list[Message]:
        """Return a device's reply to its message, or none if it is unacceptable."""
        try:
            if report.failed:
                raise FlowerMessageError(report.failed)
            reply = read_message(Path(report.reply).read_bytes())
            if reply.metadata.src_node_id != report.node:
                raise FlowerMessageError(f"it claims to come from node {reply.metadata.src_node_id}")
            if reply.metadata.dst_task_id != asked.metadata.src_task_id:
                raise FlowerMessageError("it replies to a message of another round")
            if reply.has_error():
                raise FlowerMessageError(str(reply.error.reason))
            self.check(asked, reply)
        except (OSError, FlowerMessageError) as error:
            self.lost[report.node] = str(error)
            return []
        return [reply]

    def _listen(self) -> None:
        for report in requests(msgspec.json.Decoder(ReplyReport)):
            self._reports.put(report)
        self._reports.put(None)
