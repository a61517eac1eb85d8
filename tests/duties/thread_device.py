"""A device that is a thread of this process, in real time: what `Steps` does with real threads, without a GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from freetoken.device.base import Actor, Flag, SystemClock, make_flags, start_thread

Node = Callable[[], None]


class ThreadGraph:
    def __init__(self, operations: list[Node]) -> None:
        self.operations = operations

    @property
    def nodes(self) -> int:
        return len(self.operations)


class ThreadStream:
    """Operations in order; there is only one stream."""

    def __init__(self, device: ThreadDevice) -> None:
        self.device, self.operations = device, list[Node]()

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        self.operations.append(lambda: work() and None)

    def ring(self, flag: Flag, answered: bool = False) -> None:
        def operation() -> None:
            flag.value = (flag.value & ~1) + 2 + answered

        self.operations.append(operation)

    def wait(self, flag: Flag, take: bool = True) -> None:
        def operation() -> None:
            while flag.value != 1 and not self.device.ended:
                time.sleep(1e-5)
            if take:
                flag.value = 0

        self.operations.append(operation)

    def take(self, flag: Flag) -> None:
        self.operations.append(lambda: setattr(flag, "value", 0))


class ThreadDevice:
    name = "thread"

    def __init__(self, queue_nodes: int) -> None:
        self.clock = SystemClock()
        self.ended = False
        self._queue: queue.Queue[Node] = queue.Queue(queue_nodes)
        self._left = 0
        self._count = threading.Lock()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def _run(self) -> None:
        while not self.ended:
            try:
                operation = self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
            operation()
            with self._count:
                self._left -= 1

    def stream(self) -> ThreadStream:
        return ThreadStream(self)

    def flags(self, n: int) -> list[Flag]:
        return make_flags(n)

    def capture(self, build: Callable[[Any], None]) -> ThreadGraph:
        stream = self.stream()
        build(stream)
        return ThreadGraph(stream.operations)

    def launch(self, graph: ThreadGraph) -> None:
        for operation in graph.operations:
            with self._count:
                self._left += 1
            try:
                self._queue.put(operation)
            except BaseException:  # Ctrl-C: this one is not there
                with self._count:
                    self._left -= 1
                raise

    def is_idle(self) -> bool:
        return not self._left

    def spawn(self, actor: Actor) -> None:
        start_thread(actor)

    def close(self) -> None:
        self.ended = True
