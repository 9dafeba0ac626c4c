"""Memory events of one rank: when each storage appears and goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

HOLDERS = ("parameters", "gradients", "optimizer", "activations", "communication", "other", "workspaces")

MEMORY_COLUMNS: dict[str, type] = {
    "record": np.int64,  # the event happens after this many records of the program
    "storage": np.int64,  # running number of the storage
    "bytes": np.int64,  # positive: allocated, negative: freed
    "stream": np.int32,
    "holder": np.uint8,  # index into HOLDERS
    "module": np.int32,  # index into the program's strings
    "phase": np.uint8,
}


@dataclass
class MemoryEvents:
    """Appended while tracing; ``columns()`` gives numpy columns (see MEMORY_COLUMNS)."""

    rows: list[tuple] = field(default_factory=list)

    def append(self, record: int, storage: int, bytes: int, stream: int, holder: int, module: int, phase: int) -> None:
        self.rows.append((record, storage, bytes, stream, holder, module, phase))

    def columns(self) -> dict[str, np.ndarray]:
        transposed = list(zip(*self.rows)) if self.rows else [() for _ in MEMORY_COLUMNS]
        return {name: np.asarray(v, dtype=t) for (name, t), v in zip(MEMORY_COLUMNS.items(), transposed)}
