"""Set-up that a framework puts off until a measured step is moved in front of it."""

from __future__ import annotations

import numpy as np

from echo_hooks.capture.capture import _one_offs_first
from echo_hooks.graph.memory import MemoryEvents
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.recorder import Recorder


def recorded(*names: str) -> Recorder:
    """A recorder with one record per name; those in capitals are one-off."""
    recorder = Recorder(0, 1)
    for name in names:
        op = recorder.ops.add(OpSignature(name))
        if name.isupper():
            with recorder.one_off():
                recorder.compute(op)
        else:
            recorder.compute(op)
    return recorder


def names(recorder: Recorder, program) -> str:
    return "".join(recorder.ops.signatures[op].name for op in program.op)


def test_one_offs_of_the_window_come_before_it_in_their_order():
    recorder = recorded(*"abCdEfG")
    events = MemoryEvents()
    for record in range(8):  # one before each record, one after the last
        events.append(record, record, 1, 0, 0, 0, 0)
    program, memory, begin = _one_offs_first(recorder.program.program(), events.columns(), recorder.one_offs, 3, 6)
    assert names(recorder, program) == "abCEdfG"
    assert begin == 4
    assert memory["storage"].tolist() == [0, 1, 2, 4, 3, 5, 6, 7]  # each still stands before its record
    assert memory["record"].tolist() == list(range(8))


def test_without_one_offs_in_the_window_nothing_moves():
    recorder = recorded(*"AbcD")
    program, memory = recorder.program.program(), MemoryEvents().columns()
    assert _one_offs_first(program, memory, recorder.one_offs, 1, 3) == (program, memory, 1)


def test_a_one_off_without_records_is_none():
    recorder = Recorder(0, 1)
    with recorder.one_off():
        pass
    assert recorder.one_offs == [] and np.array_equal(recorder.program.program().op, [])
