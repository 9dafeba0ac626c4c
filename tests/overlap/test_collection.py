"""Collection: what stamps say, pairs measured through a pretended device, and the kernels' signatures."""

from __future__ import annotations

import math

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.overlap.collection import collect
from echo_hooks.overlap.collection.collect import Alone, Call, Plan, kernel_names, measure_all
from echo_hooks.overlap.collection.cuda import launches_in
from echo_hooks.overlap.collection.kernels import kernels, signature_of
from echo_hooks.overlap.collection.trials import (
    Stamps,
    alone,
    covered_calls,
    covered_kernels,
    kernels_beside_waiting,
    mean_of_calls,
)
from echo_hooks.overlap.samples import Launch, medians, read_samples


def test_only_what_lies_wholly_within_the_other_counts():
    stamps = Stamps(kernels=(0, 10, 30, 50, 75, 100), calls=(0, 20, 60, 80))
    # The first call waits for the other ranks, so kernels count from 20 to 80: [30, 50] and [50, 75].
    assert covered_kernels(stamps, per_group=1) == (22.5, 2, 3)
    assert covered_kernels(stamps, per_group=5) == (4.5, 10, 15)
    # All calls but the first lie within the kernels, 0 to 100.
    assert covered_calls(stamps) == (1, 3)
    assert mean_of_calls(stamps, 1, 3) == 30.0
    # Kernels that end at 70 do not cover the last call.
    assert covered_calls(Stamps(kernels=(0, 70), calls=(0, 20, 60, 80))) == (1, 2)


def test_nothing_covered_is_not_a_number():
    overlap_us, kept, dropped = covered_kernels(Stamps(kernels=(0, 500), calls=(0, 20, 60)), 1)
    assert math.isnan(overlap_us) and (kept, dropped) == (0, 1)
    assert covered_calls(Stamps(kernels=(10, 30), calls=(0, 20, 60))) == (0, 0)
    assert math.isnan(mean_of_calls(Stamps(calls=(0, 1)), 0, 0))


def test_time_alone_leaves_out_the_first():
    assert alone((0, 50, 60, 70)) == 10.0
    assert alone((0, 50, 60, 70), per_group=5) == 2.0
    assert math.isnan(alone((0, 50)))


def test_kernels_beside_a_call_that_waits_end_before_it_moves_data():
    # The call ends at 1,000 and takes 100 alone: kernels that end by 850 count, but the first.
    stamps = Stamps(kernels=(0, 300, 500, 700, 900), calls=(0, 1000))
    assert kernels_beside_waiting(stamps, 1, call_us=100) == 200.0


class PretendedDevice:
    """Kernels take 50 us, calls 200; together 1.5 and 1.25 times as long."""

    device = None
    issue_us = (5.0, 40.0)

    def __init__(self, starved=False):
        self.starved = starved

    def launches(self, calls):
        return {name: Launch(132, 384, 168, 213188, 1) for name, _ in calls}

    def release(self):
        pass

    def repeated(self, call, per_group):
        return per_group

    def trial(self, kernel, groups, call, calls, *, gate_us, kernels_after_us=0.0, calls_after_us=0.0):
        both = kernel is not None and call is not None
        kernel_us, call_us = 50.0 * (1.5 if both else 1.0), 200.0 * (1.25 if both else 1.0)
        lane = [kernels_after_us + i * kernel_us * kernel for i in range(groups + 1)] if kernel else ()
        return Stamps(tuple(lane), tuple(i * call_us for i in range(calls + 1)) if call else (), self.starved)


def run(tmp_path, device, names=("add", "broken")):
    def build(device):
        import torch

        a = torch.zeros(64)
        return lambda: a + a

    def broken(device):
        raise RuntimeError("no such kernel here\nand more")

    plan = Plan(tmp_path / "pairs.parquet", "h200-sxm", names, repeats=2)
    calls = [Call("all_reduce", 1 << 20, lambda: None, 200.0, Launch(24, 544), "ring", "simple")]
    measure_all(plan, device, Alone(), calls, about={}, builders={"add": build, "broken": broken})
    return read_samples(plan.out)


def test_pairs_are_measured_and_written(tmp_path):
    samples, about = run(tmp_path, PretendedDevice())
    assert [(s.kernel, s.repeat) for s in samples] == [("add", 0), ("add", 1)]
    (s,) = medians(samples)
    assert (s.base_us, s.overlap_us, s.call_base_us, s.call_overlap_us) == (50.0, 75.0, 200.0, 250.0)
    assert (s.channels, s.threads, s.call, s.bytes, s.source) == (24, 544, "all_reduce", 1 << 20, "pair")
    assert s.signature.name == "aten.add.Tensor" and s.launch.registers == 168
    assert about["left_out"] == {"broken": "no such kernel here"}


def test_repeats_with_a_starved_lane_are_dropped_and_counted(tmp_path):
    samples, about = run(tmp_path, PretendedDevice(starved=True))
    assert samples == [] and about["repeats_dropped"] == 2


def test_one_gpu_is_told_of_the_stand_in(tmp_path):
    with pytest.raises(UsageError, match="--emulate measures against a stand-in"):
        collect.collect(Plan(tmp_path / "x", "h200-sxm", ("add",), ranks=99))


def test_unknown_kernels_are_refused():
    assert set(kernel_names("softmax_4096,gelu_back")) == {"gelu_backward_8192x8192", "softmax_4096x8192"}
    with pytest.raises(UsageError, match="no kernel begins so"):
        kernel_names("nonsense")


def test_kernels_describe_themselves():
    import torch
    from torch._subclasses import FakeTensorMode

    known = kernels()
    with FakeTensorMode():
        mm = signature_of(known["gemm_4096x2048x8192"](torch.device("cpu")))
        transpose = signature_of(known["transpose_8192x8192"](torch.device("cpu")))
    assert mm.flops == 2 * 4096 * 2048 * 8192
    assert mm.bytes_read == 2 * (4096 * 8192 + 8192 * 2048) and mm.bytes_written == 2 * 4096 * 2048
    assert transpose.name == "aten.clone.default"  # the view launches nothing


def test_launch_geometry_is_that_of_the_longest_kernel():
    def kernel(correlation, us, grid):
        args = {"correlation": correlation, "grid": grid, "block": [128, 1, 1], "registers per thread": 32}
        return {"cat": "kernel", "name": "k", "ts": 50, "dur": us, "args": args}

    events = [
        {"cat": "user_annotation", "name": "overlap:mine", "ts": 0, "dur": 10},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2, "dur": 1, "args": {"correlation": 1}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 4, "dur": 1, "args": {"correlation": 2}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 14, "dur": 1, "args": {"correlation": 3}},
        kernel(1, 5, [7, 2, 1]),
        kernel(2, 3, [1, 1, 1]),
        kernel(3, 90, [9, 9, 9]),
    ]
    assert launches_in(events) == {"mine": Launch(14, 128, 32, 0, 2)}
