"""The band of the step time."""

from __future__ import annotations

import numpy as np
import pytest
from hand_built import FakeNetwork, Plan

from echo_hooks.compose import Variability
from echo_hooks.graph.program import Evidence

CERTAIN = dict.fromkeys(Evidence, 0.0)


def steps(kernels: int = 400) -> Plan:
    plan = Plan(2)
    for r in (0, 1):
        rank = plan.rank(r)
        for _ in range(kernels):
            rank.run(10)
        rank.collective(100)
        rank.sync()
    return plan


def test_certain_inputs_have_no_band():
    found = steps().compose(variability=Variability(samples=3, sigma=CERTAIN)).band
    assert found.p10_us == found.p50_us == found.p90_us == 4100


def test_same_seed_same_band():
    options = [Variability(samples=8, seed=s, jitter=0.1) for s in (1, 1, 2)]
    first, again, other = (steps().compose(variability=v).band for v in options)
    assert first == again and first != other


def test_one_model_error_moves_all_its_kernels():
    """All kernels are one operation: its log-normal factor is the step's. z(0.9) is 1.2816."""
    sigma = {**CERTAIN, Evidence.MODELLED: 0.1}
    plan = steps()
    found = plan.compose(FakeNetwork(lambda *a: 0.0), variability=Variability(samples=4000, sigma=sigma)).band
    assert found.p90_us / found.p50_us == pytest.approx(np.exp(0.1 * 1.2816), rel=0.01)
    assert found.p10_us / found.p50_us == pytest.approx(np.exp(-0.1 * 1.2816), rel=0.01)


def test_jitter_averages_out_and_the_slower_rank_decides():
    """The sum of 400 kernels has mean 4000 exp(0.02) and deviation 4000 * 0.203 / 20; of two ranks the later counts."""
    found = (
        steps()
        .compose(FakeNetwork(lambda *a: 0.0), variability=Variability(samples=600, sigma=CERTAIN, jitter=0.2), repeat=2)
        .band
    )
    mean, deviation = 4000 * np.exp(0.02), 4000 * np.exp(0.02) * np.sqrt(np.exp(0.04) - 1) / 20
    # The larger of two normal numbers has median mean + 0.5449 deviations.
    assert found.p50_us == pytest.approx(mean + 0.5449 * deviation, rel=0.003)
    assert found.p10_us > 4000


def test_half_of_the_variance_is_common():
    """A hundred different operations of equal length: the common half stays, the other averages out."""
    plan = Plan(1)
    rank = plan.rank(0)
    for i in range(100):
        rank.run(10, name=f"op{i}")
    rank.sync()
    found = plan.compose(variability=Variability(samples=3000, sigma={**CERTAIN, Evidence.MODELLED: 0.1})).band
    expected = 0.1 * np.sqrt(0.5 + 0.5 / 100)
    assert np.log(found.p90_us / found.p10_us) == pytest.approx(2 * 1.2816 * expected, rel=0.03)


def test_host_times_move_together():
    """A step of nothing but host time is as wrong as that."""
    plan = Plan(1)
    rank = plan.rank(0)
    for _ in range(50):
        rank.run(1, host=10)
    rank.sync()
    found = plan.compose(variability=Variability(samples=4000, sigma=CERTAIN, host_sigma=0.1)).band
    assert found.p90_us / found.p50_us == pytest.approx(np.exp(0.1 * 1.2816), rel=0.01)


def test_noise_is_each_ranks_own_though_folded():
    """Two ranks of one role: the later of two independent sums decides, as if simulated unfolded."""
    plan = Plan(2)
    rank = plan.rank(0, (1,))
    for _ in range(100):
        rank.run(10)
    rank.collective(100)
    rank.sync()
    noisy = Variability(samples=16, sigma=CERTAIN, jitter=0.1)
    folded, single = (plan.compose(variability=noisy, folded=f) for f in (True, False))
    assert (len(folded.timelines), len(single.timelines)) == (1, 2)
    assert folded.band == single.band
    assert "sigma 10 % (each rank's own)" in folded.band.basis


def test_no_band_where_it_takes_too_long():
    records = 2 * 2 * 402  # copies, classes, records
    few = Variability(samples=32, most_records=10 * records)
    assert "10 simulations" in steps().compose(variability=few).band.basis
    assert steps().compose(variability=Variability(most_records=7 * records)).band is None
