"""Whose turn it is: a bounded queue, a bounded set of running requests, one step each in turn, on one thread.

Not here: what a step computes (`work`). Every accepted task ends with exactly one terminal event, after all that it
held has been let go; no exception of one task touches another.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from farfill.engines.api import EngineEvent, OnEvent, RequestAborted, RequestFailed, RequestFinished
from farfill.engines.hf.work import Held, Steps
from farfill.errors import ClientError, FarfillError, LocalProtocolError, OverloadError

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Task:
    """One accepted request.

    Attributes:
        held: what it holds; let go before the terminal event.
        begin: makes the generator that does the work; called on the engine's thread, at the first step.
    """

    request_id: str
    on_event: OnEvent
    held: Held
    begin: Callable[[], Steps]
    steps: Steps | None = None


class _Phase(Enum):
    OPEN = auto()
    DRAINING = auto()  # accepts nothing more
    STOPPING = auto()  # and aborts what is left


@dataclass(slots=True)
class Ended:
    """How many tasks have ended, and how."""

    finished: int = 0
    failed: int = 0
    aborted: int = 0


@dataclass(slots=True)
class _Queues:
    """Everything that other threads touch, under one lock. A task is in exactly one of `waiting` and `running`."""

    waiting: OrderedDict[str, Task] = field(default_factory=OrderedDict)
    running: OrderedDict[str, Task] = field(default_factory=OrderedDict)
    aborting: set[str] = field(default_factory=set)
    phase: _Phase = _Phase.OPEN
    died: bool = False


class Scheduler:
    """Starts its thread at once.

    Args:
        running_max: requests that take turns; each holds a cache.
        waiting_max: requests that wait for one of those places; one more is refused.
        threads: PyTorch's threads for one operation.
    """

    def __init__(self, *, running_max: int, waiting_max: int, threads: int) -> None:
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._threads = threads
        self._queues = _Queues()
        self._changed = threading.Condition()
        self._cache_bytes: dict[str, int] = {}
        self.ended = Ended()
        self._thread = threading.Thread(target=self._run, name="farfill-engine", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queues a task, or raises and has not taken it."""
        with self._changed:
            queues = self._queues
            if queues.died:
                raise LocalProtocolError("the engine's thread has died of an error; see the log")
            if queues.phase is not _Phase.OPEN:
                raise OverloadError("draining", "the engine is stopping; send the request to another worker")
            if task.request_id in queues.waiting or task.request_id in queues.running:
                raise ClientError(
                    "invalid_request", f"request id {task.request_id!r} is already in the engine", field="request_id"
                )
            if len(queues.waiting) >= self._waiting_max:
                raise OverloadError(
                    "queue_full",
                    f"{len(queues.waiting)} requests are waiting for the engine already",
                    retry_after_s=1.0,
                )
            queues.waiting[task.request_id] = task
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._queues.waiting or request_id in self._queues.running:
                self._queues.aborting.add(request_id)
                self._changed.notify_all()

    def stop(self, drain_s: float) -> None:
        assert threading.current_thread() is not self._thread, "stop must not be called from an event callback"
        give_up = time.monotonic() + drain_s
        with self._changed:
            if self._queues.phase is _Phase.OPEN:
                self._queues.phase = _Phase.DRAINING
            while (self._queues.waiting or self._queues.running) and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(left)
            self._queues.phase = _Phase.STOPPING
            self._changed.notify_all()
        self._thread.join()

    def counts(self) -> tuple[int, int, int]:
        """(running, waiting, bytes of the caches that running requests hold)."""
        with self._changed:
            return len(self._queues.running), len(self._queues.waiting), sum(self._cache_bytes.values())

    # ------------------------------------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        turns: deque[Task] = deque()
        try:
            with torch.inference_mode():
                while (task := self._next(turns)) is not None:
                    if not self._step(task):
                        turns.append(task)
        except BaseException:
            log.exception("the engine's thread has died; every request in it fails")
            self._fail_all()
            raise

    def _next(self, turns: deque[Task]) -> Task | None:
        """The task to step now; blocks until there is one. None: stop. Ends aborted tasks on the way."""
        while True:
            with self._changed:
                queues = self._queues
                if queues.phase is _Phase.STOPPING:
                    queues.aborting.update(queues.waiting, queues.running)
                aborted = [
                    task
                    for name in sorted(queues.aborting)
                    if (task := queues.waiting.get(name) or queues.running.get(name))
                ]
                queues.aborting.clear()
                if not aborted:
                    while queues.waiting and len(queues.running) < self._running_max:
                        name, task = queues.waiting.popitem(last=False)
                        queues.running[name] = task
                        turns.append(task)
                    if turns:
                        return turns.popleft()
                    if queues.phase is _Phase.STOPPING:
                        return None
                    self._changed.wait()
            for task in aborted:
                if task in turns:
                    turns.remove(task)
                self._end(task, RequestAborted())

    def _step(self, task: Task) -> bool:
        """One step; whether the task has ended with it."""
        try:
            if task.steps is None:
                task.steps = task.begin()
            next(task.steps)
        except StopIteration as stop:
            self._end(task, RequestFinished(stop.value))
            return True
        except FarfillError as error:
            if isinstance(error, LocalProtocolError):
                log.exception("request %s has met a bug", task.request_id)
            self._end(task, RequestFailed(error))
            return True
        except Exception as error:
            log.exception("request %s has met a bug", task.request_id)
            self._end(task, RequestFailed(LocalProtocolError(f"the engine failed: {type(error).__name__}: {error}")))
            return True
        with self._changed:
            self._cache_bytes[task.request_id] = task.held.bytes_held()
        return False

    def _end(self, task: Task, event: EngineEvent) -> None:
        """Lets go of everything, then tells."""
        try:
            if task.steps is not None:
                task.steps.close()
            task.held.let_go()
        except Exception as error:
            log.exception("request %s has met a bug at its end", task.request_id)
            event = RequestFailed(LocalProtocolError(f"the engine failed: {type(error).__name__}: {error}"))
        task.steps = None
        with self._changed:
            self._queues.waiting.pop(task.request_id, None)
            self._queues.running.pop(task.request_id, None)
            self._cache_bytes.pop(task.request_id, None)
            match event:
                case RequestFinished():
                    self.ended.finished += 1
                case RequestFailed():
                    self.ended.failed += 1
                case _:
                    self.ended.aborted += 1
        try:
            task.on_event(event)
        except Exception:
            log.exception("the callback of request %s failed on its terminal event", task.request_id)
        with self._changed:
            self._changed.notify_all()

    def _fail_all(self) -> None:
        with self._changed:
            self._queues.died = True
            tasks = [*self._queues.running.values(), *self._queues.waiting.values()]
        for task in tasks:
            self._end(task, RequestFailed(LocalProtocolError("the engine's thread has died of an error; see the log")))
