"""What the supervisor wants of a worker, between the thread that hears it and the one that trains. Torch-free."""

import threading
from collections.abc import Callable
from typing import Any, Protocol

from agent.worker.channel import Channel
from planner.ir.errors import PortError


class Interrupted(PortError):
    """The step was left in the middle, as asked; the state of the last commit stands."""


class Training(Protocol):
    """What is controlled."""

    step: int

    def interrupt(self) -> None:
        """Have the gate called soon."""


class Control:
    """What the supervisor wants; set by the control thread, obeyed between two instructions.

    `abandon` is called to leave while there is no trainer, and so nothing to lose.
    """

    def __init__(self, channel: Channel | None, abandon: Callable[[], None]) -> None:
        self.channel, self._abandon = channel, abandon
        self.trainer: Training | None = None
        self._changed = threading.Condition()
        self._paused = self._leaving = self.stopping = False
        self._plan: tuple[int, str] | None = None
        self.checkpoint_wanted = False

    def handle(self, message: dict[str, Any]) -> None:
        with self._changed:
            match message.get("cmd"):
                case "pause":
                    self._paused = True
                case "resume":
                    self._paused = False
                case "leave":
                    self._leaving = True
                case "stop":
                    self.stopping = True
                case "checkpoint":
                    self.checkpoint_wanted = True
                case "plan" if isinstance(message.get("plan"), int):
                    self._plan = message["plan"], str(message.get("reason", ""))
            self._changed.notify_all()
            self._interrupt()

    def attach(self, trainer: Training) -> None:
        """Let what was heard so far, and what comes, hold for this trainer."""
        with self._changed:
            self.trainer = trainer
            self._interrupt()

    def _interrupt(self) -> None:
        if self.trainer is not None and (self._paused or self._leaving):
            self.trainer.interrupt()
        elif self._leaving:
            self._abandon()

    def leave(self) -> None:
        self.handle({"cmd": "leave"})

    def gate(self) -> None:
        """Wait while paused; raise Interrupted to leave."""
        with self._changed:
            if self._paused and not self._leaving:
                self._tell("paused")
                while self._paused and not self._leaving:
                    self._changed.wait()
                if not self._leaving:
                    self._tell("resumed")
            if self._leaving:
                raise Interrupted("left on request")

    def take_plan(self) -> tuple[int, str] | None:
        with self._changed:
            plan, self._plan = self._plan, None
            return plan

    def _tell(self, event: str) -> None:
        if self.channel and self.trainer:
            self.channel.send({"event": event, "step": self.trainer.step})
