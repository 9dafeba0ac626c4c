"""The key-value store of a world with one process: what others would set is known from their traces, or refused."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from echo_hooks.errors import ScriptError
from echo_hooks.world.payloads import Payload

if TYPE_CHECKING:
    from echo_hooks.world.virtual_world import VirtualWorld


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class VirtualStore(dist.Store):
    """A ``torch.distributed.Store`` that never waits.

    A key that this rank has not set is answered from a rank traced before; failing that ScriptError is raised at
    once, naming key, rank and source line. ``add`` counts as if every rank had made the same call.
    """

    def __init__(self, world: VirtualWorld):
        super().__init__()
        self.world = world
        self._data: dict[str, bytes] = {}
        self._timeout = timedelta(minutes=30)

    def set(self, key: str, value: str | bytes) -> None:
        self._data[key] = _bytes(value)
        self.world.payloads.put(self.world.rank, f"store/{key}", Payload("store", len(value), "uint8", _bytes(value)))

    def get(self, key: str) -> bytes:
        value = self._find(key)
        if value is None:
            site = self.world.recorder.site() or "an unknown line"
            raise ScriptError(
                f"Rank {self.world.rank} asks the store for {key!r} at {site}, which no rank traced before has set; "
                "trace the rank that sets it first (--trace-ranks), or set it on every rank.",
                rank=self.world.rank,
            )
        return value

    def _find(self, key: str) -> bytes | None:
        if key in self._data:
            return self._data[key]
        for rank in self.world.payloads.ranks():
            payload = self.world.payloads.get(rank, f"store/{key}") if rank != self.world.rank else None
            if payload is not None and payload.data is not None:
                return payload.data
        return None

    def add(self, key: str, amount: int) -> int:
        world_size = self.world.recorder.world_size
        if amount and world_size > 1:
            self.world.recorder.assume("store counter: peers' shares", "as this rank's own")
        total = int(self._data.get(key, b"0")) + amount * world_size
        self._data[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(self._find(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        present = self._find(key)
        if (present is None and not expected) or present == _bytes(expected):
            self.set(key, desired)
            return _bytes(desired)
        return _bytes(expected) if present is None else present

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._data.get(key, b"") + _bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return self._data.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._data)

    deleteKey = delete_key  # C++ looks these two up under its own names
    getNumKeys = num_keys

    def list_keys(self) -> list[str]:
        return sorted(self._data)

    def barrier(self, *args, **kwargs) -> None:
        """Everyone arrives at once."""

    def queue_push(self, *args):
        raise NotImplementedError("Store.queue_push is not simulated")

    def queue_pop(self, *args):
        raise NotImplementedError("Store.queue_pop is not simulated")

    def queue_len(self, *args):
        raise NotImplementedError("Store.queue_len is not simulated")

    def clone(self) -> VirtualStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout
