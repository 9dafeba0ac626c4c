"""Module path and phase of whatever is recorded next, in forward and in backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch.nn.modules import module as nn_module

from echo_hooks.graph.program import Phase
from echo_hooks.graph.recorder import Recorder

_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_OPEN = 1 << 62


class Labels:
    """Keeps a stack of running modules and, for backward, which autograd sequence numbers each of them made.

    Forward: the innermost running module. Backward: the running node's sequence number lies in the intervals of the
    modules that made it; the one that opened last is the innermost. Intervals are kept in order of opening, each with
    its parent, so the search is a bisection and a short walk up.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.in_optimizer = 0
        self.backward_seen = False
        self.first_module_record = 0
        self._paths: dict[int, int] = {}
        self._stack: list[int] = []  # indices into the interval lists
        self._start: list[int] = []
        self._end: list[int] = []
        self._path: list[int] = []
        self._parent: list[int] = []
        self._hooks: list = []
        self.on_module: Callable[[torch.nn.Module], None] | None = None  # called with each module at its first call

    def install(self) -> None:
        self._hooks = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._exit, always_call=True),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def update(self) -> None:
        """Set the recorder's labels for an op that is about to be recorded."""
        recorder = self.recorder
        node = _current_node()
        if node is None:
            recorder.phase = Phase.OPTIMIZER if self.in_optimizer else Phase.FORWARD
            recorder.module = self._path[self._stack[-1]] if self._stack else 0
        else:
            self.backward_seen = True
            recorder.phase = Phase.BACKWARD
            # A non-empty module stack inside backward is recomputation: its own path is the right one.
            recorder.module = self._path[self._stack[-1]] if self._stack else self._path_of(node)

    def _path_of(self, node) -> int:
        number = node._sequence_nr()
        if number >= _OPEN:  # AccumulateGrad
            return 0
        index = bisect_right(self._start, number) - 1
        while index >= 0 and self._end[index] <= number:
            index = self._parent[index]
        return self._path[index] if index >= 0 else 0

    def _enter(self, module, _inputs) -> None:
        recorder = self.recorder
        recorder.enter()
        path = self._paths.get(id(module))
        if path is None:
            path = self._name(module)
        self._start.append(_sequence_number())
        self._end.append(_OPEN)
        self._path.append(path)
        self._parent.append(self._stack[-1] if self._stack else -1)
        self._stack.append(len(self._start) - 1)
        recorder.leave()

    def _exit(self, _module, _inputs, _output) -> None:
        self.recorder.enter()
        if self._stack:
            self._end[self._stack.pop()] = _sequence_number()
        self.recorder.leave()

    def _name(self, module) -> int:
        """First call of a module that no parent has named: the root of a tree, which names all below."""
        if not self._paths:
            self.first_module_record = len(self.recorder.program)
        for name, child in module.named_modules():
            if id(child) not in self._paths:
                path = f"{type(module).__name__}.{name}" if name else type(module).__name__
                self._paths[id(child)] = self.recorder.program.string(path)
                if self.on_module is not None:
                    self.on_module(child)
        return self._paths[id(module)]
