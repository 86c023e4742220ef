"""Keep on a GPU what the program's own autograd functions are given and make: their kernels may be C++
that no operator announces.

Functions of flash-attention, bitsandbytes, liger-kernel and unsloth are of this kind. Their operands stay until the
function returns, and so do tensors that are made inside or asked for by the backward pass, together at most half of the
memory. A kernel in C++ that uses any other evicted tensor ends with an illegal address (`DevicePool.explain`).
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, Function

from port_agent.intercept.dispatch.mode import Interceptor
from port_agent.intercept.patches.replaced_attributes import ReplacedAttributes
from port_agent.intercept.residency.operands import is_wrapper, tensors_in
from port_agent.intercept.residency.storages import Storage
from port_planner.torch_compat.autograd import SAVED_TENSORS, saved_tensors

_KEPT_SHARE = 1 / 2
"""Largest share of a budget for a whole process that stays for one function; a budget for
tensors alone may be exceeded.
"""

_OF_OPERATORS = "torch."
"""Functions of torch itself, such as checkpoints, consist of operators."""


class FunctionGuards:
    """Wraps the calls of autograd functions that are written in Python, and puts them back."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._running = threading.local()
        """`kept`: for each function that runs in this thread, outermost first, the storages that stay for it."""
        self._replaced = ReplacedAttributes()

    def install(self) -> None:
        """Wrap the calls."""
        forward, backward = vars(Function)["apply"], vars(BackwardCFunction)["apply"]

        @functools.wraps(forward.__func__)
        def apply_forward(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with self._keeping(cls, (*args, *kwargs.values())):
                return forward.__func__(cls, *args, **kwargs)

        @functools.wraps(backward)
        def apply_backward(context: Any, *args: Any) -> Any:
            with self._keeping(context._forward_cls, args):
                return backward(context, *args)

        def saved(context: Any) -> Any:
            found = saved_tensors(context)
            self._keep(found)
            return found

        self._replaced.replace(Function, "apply", classmethod(apply_forward))
        self._replaced.replace(BackwardCFunction, "apply", apply_backward)
        self._replaced.replace(BackwardCFunction, SAVED_TENSORS, property(saved))
        self._interceptor.when_made = self._add

    def remove(self) -> None:
        """Put the calls back."""
        self._replaced.put_back()

    @contextlib.contextmanager
    def _keeping(self, function: type, arguments: Sequence[Any]) -> Iterator[None]:
        """Keep the device's tensors among arguments, and what is made meanwhile; other threads run operators."""
        if self._interceptor.device is None or function.__module__.startswith(_OF_OPERATORS):
            yield
            return
        functions = vars(self._running).setdefault("kept", [])
        functions.append([])
        try:
            self._keep(arguments)
            yield
        finally:
            kept = functions.pop()
            with self._interceptor.lock:
                for storage in kept:
                    storage.pins -= 1

    def _keep(self, arguments: Sequence[Any]) -> None:
        """Bring the device's tensors among arguments, and keep them for the function that runs, if they fit."""
        interceptor, device = self._interceptor, self._interceptor.device
        if device is None or not vars(self._running).get("kept"):
            return
        with interceptor.lock:
            given = [t for t in tensors_in(arguments) if t.device == device.device and not is_wrapper(t)]
            found = (interceptor.table.of(t) for t in given if t.layout is torch.strided)
            added = self._add([s for s in dict.fromkeys(found) if s is not None])
            device.storages.streams.note()
            with contextlib.suppress(torch.OutOfMemoryError):  # fragmented: operators bring one after another
                interceptor.pools.ensure_resident(added)

    def _add(self, storages: Sequence[Storage]) -> list[Storage]:
        """Pin storages of the device for the function that runs in this thread, as many as may stay; return which."""
        functions, device = vars(self._running).get("kept"), self._interceptor.device
        if not functions or device is None:
            return []
        kept: list[Storage] = functions[-1]
        most = math.inf if device.budget is None else device.residency.limit_bytes * _KEPT_SHARE
        left, added = most - sum(s.nbytes for s in kept), []
        for storage in storages:
            if storage.table is device.residency.table and storage.nbytes <= left:
                left -= storage.nbytes
                storage.pins += 1
                kept.append(storage)
                added.append(storage)
        return added
