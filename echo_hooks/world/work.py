"""What a call returns: a Work and a Future whose waiting is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from echo_hooks.world.streams import Completion

if TYPE_CHECKING:
    from echo_hooks.graph.recorder import Recorder


class RecordedWork(Work):
    """An issued communication. The result is there at once; ``wait`` records who waits."""

    def __init__(self, recorder: Recorder, outputs: list[torch.Tensor], completion: Completion, source: int = -1):
        super().__init__()  # without it the object is unusable from C++
        self.recorder = recorder
        self.outputs = outputs
        self.completion = completion
        self.source = source

    def wait(self, timeout=None) -> bool:
        with self.recorder.own_time():
            self.completion.wait(self.recorder)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        with self.recorder.own_time():
            self.completion.poll(self.recorder)
        return True

    def is_success(self) -> bool:
        return True

    def exception(self):
        return None

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def source_rank(self) -> int:
        """Group rank of the sender of a recv."""
        if self.source < 0:
            raise RuntimeError("source_rank() belongs to a recv")
        return self.source

    _source_rank = source_rank

    def get_future(self) -> RecordedFuture:
        """Holds the LIST of outputs, as DDP's communication hooks expect."""
        future = RecordedFuture(self.recorder, self.completion)
        future.set_result(self.outputs)
        if torch._C._current_graph_task_id() != -1:
            # DDP's C++ reducer waits for futures without any Python call, in the callback that ends backward. Ours
            # is queued before that one, so the wait is recorded where it happens.
            torch.autograd.Variable._execution_engine.queue_callback(future.recorded_wait)
        return future

    def get_future_result(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(0)  # WorkResult.SUCCESS
        return future


class RecordedFuture(torch.futures.Future):
    """A finished future; callbacks run as if on the stream of the communication, waiting is recorded."""

    def __init__(self, recorder: Recorder, completion: Completion):
        super().__init__()
        self.recorder = recorder
        self._latest = [completion]  # shared along a chain: the last link is what the reducer waits for

    def recorded_wait(self) -> None:
        with self.recorder.own_time():
            self._latest[0].wait(self.recorder)

    def wait(self) -> Any:
        self.recorded_wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> RecordedFuture:
        child = RecordedFuture(self.recorder, self._latest[0])
        child._latest = self._latest
        completion = self._latest[0]
        if completion.host or completion.event < 0:
            child.set_result(callback(self))
            return child
        caller, self.recorder.stream = self.recorder.stream, completion.stream
        try:
            child.set_result(callback(self))
        finally:
            self.recorder.stream = caller
        self._latest[0] = Completion(self.recorder.record_event(completion.stream), stream=completion.stream)
        return child
