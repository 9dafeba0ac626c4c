"""Device memory while tracing: storages of pretended tensors, the allocator behind them, and what each one is for."""

from __future__ import annotations

from collections import defaultdict

import torch

from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.allocator_blocks import Block
from echo_hooks.devices.host_memory import HostMemory
from echo_hooks.devices.pretended import Pretended, Storage
from echo_hooks.graph.memory import HOLDERS
from echo_hooks.graph.program import Phase
from echo_hooks.graph.recorder import Recorder
from echo_hooks.graph.roles import MemorySummary

_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _COMMUNICATION, _OTHER, _WORKSPACES = range(len(HOLDERS))


class Memory:
    """Makes and frees storages, on the device and on the host; ``summary()`` gives the peaks and what held them.

    A storage's holder is guessed from the phase it appears in and corrected once a module or an optimizer is seen
    to own it.
    """

    def __init__(self, recorder: Recorder, allocator: CachingAllocator, workspace_bytes: int = 0):
        """``workspace_bytes``: what each thread and stream that multiplies matrices holds from then on."""
        self.recorder = recorder
        self.allocator = allocator
        self.host = HostMemory()
        self.workspace_bytes = workspace_bytes
        self._workspaces: set[tuple[bool, int]] = set()
        self.in_training = False  # set at the first module call
        self._number = 0
        self._holder: dict[int, int] = {}
        self._unowned: dict[int, int] = {}  # living storages held as activations, and the phase they appeared in

    def new(self, bytes: int, device: torch.device) -> Storage:
        self._number += 1
        storage = Storage(self._number, 0, device, self.recorder.stream, self)
        self._allocate(storage, bytes)
        return storage

    def resize(self, storage: Storage, bytes: int) -> None:
        """What torch.UntypedStorage.resize_ does: give the block back and take another."""
        if bytes == storage.bytes:
            return
        storage.version += 1
        if storage.handle is not None:
            self.free(storage)
        storage.stream = self.recorder.stream
        self._allocate(storage, bytes)

    def _allocate(self, storage: Storage, bytes: int) -> None:
        storage.bytes = bytes
        if not bytes:
            return
        if storage.device.type == "cpu":
            storage.handle = self.host.allocate(bytes)
            return
        recorder = self.recorder
        holder = self._holder.get(storage.number)
        if holder is None:
            holder = self._holder[storage.number] = self._guess()
        if holder == _ACTIVATIONS:
            self._unowned[storage.number] = recorder.phase
        storage.handle = self.allocator.allocate(bytes, storage.stream)
        recorder.memory.append(
            len(recorder.program), storage.number, bytes, storage.stream, holder, recorder.module, recorder.phase
        )

    def work(self) -> None:
        """A matrix product runs: its library's workspace for this thread and stream is there from now on.

        On the device backward has a thread of its own, and with it a handle of its own.
        """
        recorder = self.recorder
        key = (recorder.phase == Phase.BACKWARD, recorder.stream)
        if key in self._workspaces or not self.workspace_bytes:
            return
        self._workspaces.add(key)
        self._workspace(self.workspace_bytes, 0)

    def pass_through(self, sizes: tuple[int, ...]) -> None:
        """A kernel holds so much for itself and gives it back at its end."""
        recorder = self.recorder
        held = [(bytes, self._number + 1, self._workspace(bytes, recorder.module)) for bytes in sizes]
        for bytes, number, block in held:
            self.allocator.free(block)
            recorder.memory.append(
                len(recorder.program), number, -bytes, recorder.stream, _WORKSPACES, recorder.module, recorder.phase
            )

    def _workspace(self, bytes: int, module: int) -> Block:
        recorder = self.recorder
        self._number += 1
        self._holder[self._number] = _WORKSPACES
        recorder.memory.append(
            len(recorder.program), self._number, bytes, recorder.stream, _WORKSPACES, module, recorder.phase
        )
        return self.allocator.allocate(bytes, recorder.stream)

    def pin(self, storage: Storage) -> None:
        if storage.device.type == "cpu" and storage.handle is not None:
            self.host.pin(storage.handle)

    def free(self, storage: Storage) -> None:
        if storage.device.type == "cpu":
            self.host.free(storage.handle)
            storage.handle = None
            storage.bytes = 0
            return
        recorder = self.recorder
        recorder.enter()
        self.allocator.free(storage.handle)
        self._unowned.pop(storage.number, None)
        recorder.memory.append(
            len(recorder.program),
            storage.number,
            -storage.bytes,
            storage.stream,
            self._holder.get(storage.number, _OTHER),
            recorder.module,
            recorder.phase,
        )
        storage.handle = None
        storage.bytes = 0
        recorder.leave()

    def _guess(self) -> int:
        if self.recorder.phase == Phase.OPTIMIZER:
            return _OPTIMIZER
        return _ACTIVATIONS if self.in_training else _OTHER

    # ---- who owns what ----

    def own_module(self, module: torch.nn.Module) -> None:
        self.in_training = True
        for parameter in module._parameters.values():
            self._own(parameter, _PARAMETERS)

    def own_gradients(self, optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._own(parameter, _PARAMETERS)
                self._own(parameter.grad, _GRADIENTS)

    def own_state(self, optimizer) -> None:
        # No activation outlives the optimizer's step: what backward made are gradients in another form (reduced
        # shards), the rest are buffers (buckets) that somebody keeps.
        for number, phase in self._unowned.items():
            if self._holder[number] == _ACTIVATIONS:
                self._holder[number] = _GRADIENTS if phase == Phase.BACKWARD else _OTHER
        self._unowned.clear()
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                self._own(value, _OPTIMIZER)

    def _own(self, tensor, holder: int) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # DTensor
        if isinstance(tensor, Pretended) and tensor.device.type != "cpu":
            self._holder[tensor.echo_storage.number] = holder

    # ---- summary ----

    def summary(self) -> MemorySummary:
        """Peak allocated and reserved of the whole run, and the holders at the allocated peak."""
        held: dict[int, int] = defaultdict(int)
        total = peak = 0
        at_peak: dict[int, int] = {}
        by_phase: dict[int, int] = defaultdict(int)
        rows = self.recorder.memory.rows
        for i, (record, number, bytes, stream, _, module, phase) in enumerate(rows):
            holder = self._holder.get(number, _OTHER)  # corrected after the event
            rows[i] = (record, number, bytes, stream, holder, module, phase)
            held[holder] += bytes
            total += bytes
            if bytes > 0:
                by_phase[phase] = max(by_phase[phase], total)
                if total > peak:
                    peak, at_peak = total, dict(held)
        return MemorySummary(
            peak_allocated_bytes=self.allocator.peak_allocated_bytes,
            peak_reserved_bytes=self.allocator.peak_reserved_bytes,
            held_at_peak={HOLDERS[h]: b for h, b in sorted(at_peak.items()) if b},
            peak_by_phase={Phase(p).name.lower(): b for p, b in sorted(by_phase.items())},
            host_peak_bytes=self.host.peak_bytes,
            host_pinned_bytes=self.host.pinned_bytes,
        )
