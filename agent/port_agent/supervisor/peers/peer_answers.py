"""Answers to paired devices; nothing is shared or solved unless configuration and policy allow it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from port_agent.malloc import release_free_memory
from port_agent.peers.decoding import public_reason
from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient, Topic, solving_patience_s
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.job.plan_revision import SOLVER_BYTES
from port_agent.system.helper_process import HelperCommand, HelperError, ask_helper
from port_agent.system.python_process import one_thread_environment
from port_planner.base.units import format_bytes, format_seconds

SOLVER_MODULE = "port_planner.search.solve_problem"
LONGEST_SOLVING_S = 600.0
_WATCH_S = 1.0
"""Seconds between checks whether a solver may continue."""


@dataclass(frozen=True, slots=True)
class FederatedContext:
    """Decisions of the surrounding agent: why nothing is trained now (or ""), how to end a worker, and how to request
    another look at the jobs.
    """

    objection: Callable[[], str]
    stop_worker: Callable[[int], None]
    wake: Callable[[], None]


class PeerAnswers:
    """Answers paired devices; `objection` returns why nothing is solved for others now, `audit` receives events."""

    def __init__(
        self,
        state_dir: Path,
        objection: Callable[[], str],
        audit: Callable[[str], None],
        federate: Callable[[PeerClient, bytes], Awaitable[bytes]],
        migrate: Callable[[PeerClient, bytes], Awaitable[bytes]],
        introduce: Callable[[PeerClient], bytes],
    ) -> None:
        """`federate` answers the leader of a federation; `migrate` the owner of a job; `introduce` devices
        that chose this introducer.
        """
        self._state_dir, self._objection, self._audit = state_dir, objection, audit
        self._federate, self._migrate, self._introduce = federate, migrate, introduce
        self._solving_for = ""
        self.options = AgentOptions()

    async def shared(self, topic: Topic, name: str) -> bytes:
        """Return what is shared under a name; raises NotAnsweredError."""
        from port_agent.peers.exchange.shared_files import SharedFiles

        if not self.options.share_with_peers:
            raise NotAnsweredError("it shares nothing (set share = true under [peers] there)")
        content = await asyncio.to_thread(SharedFiles(self._state_dir).read, topic, name)
        if content is None:
            raise NotAnsweredError(f"it has no such {topic.value}")
        return content

    async def keep(self, topic: Topic, name: str, content: bytes) -> None:
        """Share content from now on. Raises NotAnsweredError if nothing is shared, SharedFileError, OSError."""
        from port_agent.peers.exchange.shared_files import SharedFiles

        if not self.options.share_with_peers:
            raise NotAnsweredError("nothing is shared with other devices; set share = true under [peers]")
        await asyncio.to_thread(SharedFiles(self._state_dir).keep, topic, name, content)

    async def federate(self, client: PeerClient, request: bytes) -> bytes:
        """Return this device's answer to a request of the device `client`, which leads a federation."""
        return await self._federate(client, request)

    async def migrate(self, client: PeerClient, request: bytes) -> bytes:
        """Return this device's answer to a request of the device `client` about a job."""
        return await self._migrate(client, request)

    async def introduce(self, client: PeerClient) -> bytes:
        """Return the devices that this device introduces to the device `client`; raises NotAnsweredError."""
        try:
            return self._introduce(client)
        except OSError as error:
            raise NotAnsweredError(public_reason(error)) from error

    def check_solving(self) -> None:
        """Raise NotAnsweredError with the reason if nothing is solved now."""
        if not self.options.solve_for_peers:
            raise NotAnsweredError("it solves for no other device (set solve = true under [peers] there)")
        if self._solving_for:
            raise NotAnsweredError(f"it is solving for {self._solving_for}")
        reason = self._objection()
        if reason:
            raise NotAnsweredError(reason)

    async def solve(self, client: str, problem: bytes, seconds: float) -> bytes:
        """Return the answer to a planning problem, found in a separate process while the policy allows it.

        Raises NotAnsweredError.
        """
        self.check_solving()
        if seconds > LONGEST_SOLVING_S:
            raise NotAnsweredError(
                f"it solves for at most {format_seconds(LONGEST_SOLVING_S)}, not {format_seconds(seconds)}"
            )
        self._solving_for, began_s = client, time.monotonic()
        outcome = "abandoned: nobody waits for it any longer"
        try:
            answer = await self._solved(problem, seconds)
            outcome = f"solved, {format_bytes(len(answer))}"
        except NotAnsweredError as error:
            outcome = str(error)
            raise
        finally:
            self._solving_for = ""
            taken = format_seconds(time.monotonic() - began_s)
            self._audit(f"{client}: a plan to solve ({format_bytes(len(problem))}): {outcome}, after {taken}")
            release_free_memory()
        return answer

    async def _solved(self, problem: bytes, seconds: float) -> bytes:
        command = HelperCommand(SOLVER_MODULE, environment=one_thread_environment(), data_bytes=SOLVER_BYTES)
        solving = asyncio.create_task(ask_helper(command, problem))
        try:
            await self._watch(solving, solving_patience_s(seconds))
            return await solving
        except HelperError as error:
            raise NotAnsweredError(f"solving {public_reason(error)}") from error
        finally:
            solving.cancel()
            await asyncio.wait({solving})

    async def _watch(self, solving: "asyncio.Task[bytes]", patience_s: float) -> None:
        """Wait for the end; raises NotAnsweredError if the policy or the time limit stops it."""
        end_s = time.monotonic() + patience_s
        while not (await asyncio.wait({solving}, timeout=_WATCH_S))[0]:
            reason = self._objection()
            if reason:
                raise NotAnsweredError(f"stopped: {reason}")
            if time.monotonic() > end_s:
                raise NotAnsweredError(f"stopped: not solved within {format_seconds(patience_s)}")
