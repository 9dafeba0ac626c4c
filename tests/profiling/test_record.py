"""The recorder with a timer that has no device: order, budget, checkpoints, what cannot be measured."""

from __future__ import annotations

import pytest
import torch

from echo_hooks.capture.costs import signature
from echo_hooks.profiling.rebuild import CannotRebuild, operand_bytes, rebuild
from echo_hooks.profiling.record import Fatal, Machine, Recorder, most_valuable_first
from echo_hooks.profiling.timer import Sample, TimingFailed
from echo_hooks.timing.database import key_of, read_database

aten = torch.ops.aten
MACHINE = Machine("NVIDIA Test", "2.11.0", "13.0", "91900")
CPU = torch.device("cpu")


class FakeTimer:
    """Every call takes as many microseconds as samples were taken before it."""

    def __init__(self):
        self.batches = []
        self.warmed = 0

    def warm_up(self, call):
        self.warmed += 1
        call()

    def measure(self, calls, plan):
        self.batches.append(len(calls))
        for planned in plan:
            calls[planned.index]()
        return [Sample(float(i + 1), float(i + 1), ("memset", "gemm")) for i in range(len(plan))]


def op(func, *args):
    args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
    return signature(func, args, {}, func(*args), [])


def recorder(path, **options):
    generator = torch.Generator().manual_seed(0)
    settings = dict(
        machine=MACHINE,
        timer=FakeTimer(),
        rebuild=lambda s: rebuild(s, CPU, generator),
        operand_bytes=operand_bytes,
        cost_us=lambda s: 1.0,
        path=path,
        say=lambda sentence: None,
    )
    return Recorder(**(settings | options))


PRODUCT = op(aten.mm.default, torch.ones(4, 8), torch.ones(16, 8).t())
SUM = op(aten.add.Tensor, torch.ones(4, 8), torch.ones(4, 8))


def test_every_operation_gets_its_conditions(tmp_path):
    path = tmp_path / "p.parquet"
    done = recorder(path).record([PRODUCT, SUM, PRODUCT])
    assert (done.wanted, done.measured, done.skipped) == (3, 2, 1)
    rows = read_database(path).rows
    assert [(r.signature.name, r.condition, r.samples) for r in rows] == [
        ("aten.mm.default", "cold", 4),
        ("aten.mm.default", "loaded", 7),
        ("aten.add.Tensor", "cold", 7),
        ("aten.add.Tensor", "warm", 6),  # the first is not warm yet
    ]
    cold = rows[0]
    assert cold.median_us == 2.5 and cold.p10_us == pytest.approx(1.3) and cold.p90_us == pytest.approx(3.7)
    assert cold.kernels == 2 and cold.kernel_names == (("memset", 1), ("gemm", 1))
    assert cold.device == "NVIDIA Test" and cold.versions == ("2.11.0", "13.0", "91900")


def test_a_second_recording_adds_what_is_missing(tmp_path):
    path = tmp_path / "p.parquet"
    recorder(path).record([SUM])
    again = recorder(path, database=read_database(path))
    done = again.record([SUM, PRODUCT])
    assert (done.measured, done.skipped) == (1, 1)
    assert {r.signature.name for r in read_database(path).rows} == {"aten.mm.default", "aten.add.Tensor"}


def test_the_budget_ends_a_recording_with_what_there_is(tmp_path):
    times = iter(range(0, 10_000, 5))
    many = [op(aten.mm.default, torch.ones(n, 8), torch.ones(8, 8)) for n in range(1, 20)]
    done = recorder(tmp_path / "p.parquet", budget_s=30.0, clock=lambda: float(next(times))).record(many)
    assert 0 < done.measured < len(many)
    assert len(read_database(tmp_path / "p.parquet").rows) == 2 * done.measured


def test_what_fails_is_listed_and_not_tried_again(tmp_path):
    path = tmp_path / "p.parquet"
    broken = []

    def refuse(s):
        broken.append(s.name)
        raise CannotRebuild("its tracer left no arguments")

    recorder(path, rebuild=refuse).record([SUM])
    database = read_database(path)
    assert [(name, why) for name, why, _ in database.unmeasured] == [
        ("aten.add.Tensor", "its tracer left no arguments")
    ]
    recorder(path, rebuild=refuse, database=database).record([SUM])
    assert len(broken) == 1


def test_a_lost_device_ends_the_recording_and_keeps_its_rows(tmp_path):
    path = tmp_path / "p.parquet"

    def lose(s):
        if s is PRODUCT:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return rebuild(s, CPU, torch.Generator())

    timer = FakeTimer()
    with pytest.raises(Fatal, match=r"aten\.mm\.default broke the device"):
        recorder(path, rebuild=lose, timer=timer).record([PRODUCT])
    assert read_database(path).unmeasured


def test_what_does_not_fit_beside_the_others_is_measured_alone(tmp_path):
    timer = FakeTimer()
    OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})

    def tight(s):
        if s is SUM and not timer.batches:
            raise OutOfMemoryError("CUDA out of memory")
        return rebuild(s, CPU, torch.Generator())

    done = recorder(tmp_path / "p.parquet", rebuild=tight, timer=timer).record([PRODUCT, SUM])
    assert done.measured == 2 and timer.batches == [1, 1]
    timer.batches.clear()
    recorder(tmp_path / "r.parquet", rebuild=tight, timer=timer).record([SUM])
    assert read_database(tmp_path / "r.parquet").unmeasured[0][1] == "CUDA out of memory"


def test_a_batch_whose_events_do_not_fit_is_halved(tmp_path):
    class Picky(FakeTimer):
        def measure(self, calls, plan):
            if len(calls) > 1:
                raise TimingFailed("no")
            return super().measure(calls, plan)

    done = recorder(tmp_path / "p.parquet", timer=Picky()).record([PRODUCT, SUM])
    assert done.measured == 2


def test_the_most_valuable_first():
    cost = {PRODUCT.name: 10.0, SUM.name: 1.0}
    tables = [([PRODUCT, SUM], [1.0, 90.0]), ([SUM], [1.0])]
    assert most_valuable_first(tables, lambda s: cost[s.name]) == [SUM, PRODUCT]


def test_dense_pointwise_operations_share_a_key_by_their_elements():
    other = op(aten.add.Tensor, torch.ones(2, 16), torch.ones(2, 16))
    assert key_of(other) == key_of(SUM)
    assert key_of(op(aten.add.Tensor, torch.ones(4, 8), torch.ones(8))) != key_of(SUM)
    assert key_of(op(aten.mm.default, torch.ones(4, 8), torch.ones(8, 16))) != key_of(PRODUCT)
