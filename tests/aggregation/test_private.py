from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fot import randomness
from fot.aggregation import Privacy, make_aggregation
from fot.aggregation import private as private_module
from fot.aggregation.accountant import Accountant, gaussian_delta, gaussian_epsilon, gaussian_noise
from fot.aggregation.private import clip_jointly, discrete_gaussian
from fot.errors import UserError


def summed(kind, arrays, privacy, sum_kind="statistics", path=(0, 0), cohort=None, seed=0, **options):
    clients = len(next(iter(arrays.values())))
    aggregation = make_aggregation(kind, seed=seed, privacy=privacy, **options)
    summation = aggregation.open(cohort or range(clients), kind=sum_kind, path=path)
    summation.add(list(range(clients)), arrays)
    return summation.close(), aggregation


def some_arrays(clients=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(clients, 8, 3, generator=generator), torch.randn(clients, generator=generator)
    return {"a": a, "b": b}


@pytest.mark.parametrize("kind", ["plain", "encoded", "secure"])
@pytest.mark.parametrize("sum_kind", ["update", "statistics"])
def test_at_zero_noise_and_no_clip_the_private_sum_is_the_plain_one(kind, sum_kind):
    free = Privacy(noise=0.0, clip=math.inf, update_clip=math.inf, updates=True)
    private, aggregation = summed(kind, some_arrays(), free, sum_kind)
    plain, _ = summed(kind, some_arrays(), None, sum_kind)
    for name, array in plain.arrays.items():
        assert torch.equal(private.arrays[name], array) and private.arrays[name].dtype == array.dtype
    assert aggregation.report()["epsilon"] == math.inf  # and that is no privacy at all


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.floats(1e-4, 1e4), st.floats(1e-2, 1e2))
def test_clipping_bounds_the_joint_norm_and_keeps_the_direction(seed, bound, size, scale):
    arrays = {name: size * array for name, array in some_arrays(4, seed).items()}
    clipped = clip_jointly(arrays, bound, {"b": scale})
    for row in range(4):
        a, b = arrays["a"][row].double(), arrays["b"][row].double()
        before = torch.cat([a.flatten(), b.reshape(1) / scale])
        after = torch.cat([clipped["a"][row].flatten(), clipped["b"][row].reshape(1) / scale])
        assert after.norm() <= bound * (1 + 1e-12)
        torch.testing.assert_close(after, before * min(1.0, bound / before.norm().item()), rtol=1e-9, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 2.0), st.integers(14, 32))
def test_rounding_to_the_ring_does_not_exceed_the_clip(seed, bound, bits):
    privacy = Privacy(noise=0.05, update_clip=bound, updates=True)
    with pytest.MonkeyPatch.context() as patch:
        silent = lambda shape, deviation, generator: torch.zeros(tuple(shape), dtype=torch.float64)  # noqa: E731
        patch.setattr(private_module, "discrete_gaussian", silent)
        arrays = {"a": some_arrays(1, seed)["a"].double()}
        sums, _ = summed("encoded", arrays, privacy, "update", update_bits=bits)
    norm = sums.arrays["a"].norm().item()
    assert norm <= bound * (1 + 1e-12)
    assert norm >= bound - 2 * math.sqrt(24) * 4.0 / 2 ** (bits - 2)  # nor is more taken than needed


@pytest.mark.parametrize("kind", ["plain", "encoded"])
def test_the_noise_of_a_sum_has_the_variance_it_is_accounted_for(kind):
    clients, entries = 6, 20_000
    privacy = Privacy(epsilon=2.0, clip=3.0, scales={"b*": 10.0})
    zeros = {"a": torch.zeros(clients, entries), "b1": torch.zeros(clients, entries)}
    sums, aggregation = summed(kind, zeros, privacy)
    z = gaussian_noise(2.0, 1e-5)
    for name, scale in [("a", 1.0), ("b1", 10.0)]:
        noise = sums.arrays[name].double() / (3.0 * z * scale)
        assert noise.var().item() == pytest.approx(1.0, abs=6 * math.sqrt(2 / entries))
        assert noise.mean().item() == pytest.approx(0.0, abs=6 / math.sqrt(entries))
    both = torch.stack([sums.arrays["a"], sums.arrays["b1"]])
    assert abs(torch.corrcoef(both)[0, 1].item()) < 6 / math.sqrt(entries)  # no noise is used twice
    other, _ = summed(kind, zeros, privacy, path=(0, 1))
    assert abs(torch.corrcoef(torch.stack([sums.arrays["a"], other.arrays["a"]]))[0, 1].item()) < 0.05
    assert aggregation.report()["epsilon"] == pytest.approx(2.0, abs=1e-6)


def test_secure_and_encoded_sums_carry_the_same_noise():
    privacy = Privacy(epsilon=1.0)
    one, _ = summed("encoded", some_arrays(), privacy)
    other, _ = summed("secure", some_arrays(), privacy)
    assert all(torch.equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
    again, _ = summed("encoded", some_arrays(), privacy, seed=1)
    assert not torch.equal(one.arrays["a"], again.arrays["a"])


def test_discrete_gaussian_has_its_probabilities():
    deviation, count = 4.0, 200_000
    drawn = discrete_gaussian([count], deviation, randomness.generator(7)).long()
    support = torch.arange(-60, 61, dtype=torch.float64)
    weights = torch.exp(-(support**2) / (2 * deviation**2))
    expected = count * weights / weights.sum()
    observed = torch.bincount(drawn + 60, minlength=121).double()
    common = expected > 20
    statistic = ((observed - expected) ** 2 / expected)[common].sum().item()
    assert statistic < common.sum().item() + 6 * math.sqrt(2 * common.sum().item())
    wide = discrete_gaussian([100, 200], 1e6, randomness.generator(8))
    assert wide.shape == (100, 200) and torch.equal(wide, wide.round())
    assert wide.std().item() == pytest.approx(1e6, rel=0.03)


def test_golden_epsilons():
    assert gaussian_delta(1.0, 0.0) == pytest.approx(0.382924922548026, abs=1e-12)  # 2 Φ(1/2) - 1
    assert gaussian_noise(1.0, 1e-5) == pytest.approx(3.730631, abs=1e-5)
    assert gaussian_epsilon(gaussian_noise(0.3, 1e-6), 1e-6) == pytest.approx(0.3, abs=1e-9)
    printed = math.sqrt(math.log(1.25e5)) / 5
    assert gaussian_epsilon(printed, 1e-5) == pytest.approx(6.824627675769, abs=1e-8)
    assert gaussian_epsilon(printed / math.sqrt(20), 1e-5) == pytest.approx(48.37182681403, abs=1e-8)
    assert gaussian_epsilon(printed / math.sqrt(380), 1e-5) == pytest.approx(525.1449056, abs=1e-5)
    high = gaussian_epsilon(0.01, 1e-5)  # where exp(epsilon) is past the range of a float
    logs = [norm.logcdf(50 - 0.01 * high), high + norm.logcdf(-50 - 0.01 * high)]
    assert math.exp(logs[0]) - math.exp(logs[1]) == pytest.approx(1e-5, rel=1e-3)


def test_the_papers_formula_is_reported_with_its_true_epsilon():
    privacy = Privacy(epsilon=5.0, calibration="paper")
    layers = {f"layer{i}": 10 * torch.ones(3, 50) for i in range(20)}
    sums, aggregation = summed("plain", layers, privacy)
    assert aggregation.report()["asked"] == 5.0
    assert aggregation.report()["epsilon"] == pytest.approx(48.37, abs=0.01)
    for task in range(1, 19):
        summation = aggregation.open(range(3), kind="statistics", path=(task, 0))
        summation.add(range(3), layers)
        summation.close()
    assert aggregation.report()["epsilon"] == pytest.approx(525.14, abs=0.01)
    assert aggregation.report()["releases"] == 19
    # Every layer is clipped to L on its own: three clients of norm 1 each, and noise.
    noise = math.sqrt(math.log(1.25e5)) / 5
    for array in sums.arrays.values():
        assert (array.sum() / math.sqrt(50)).item() == pytest.approx(3.0, abs=5 * noise)


def test_composition_agrees_with_dp_accounting():
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    accountant, reference = Accountant(1e-5), pld.PLDAccountant()
    for noise in (2.0, 3.0, 5.0, 3.0):
        accountant.add(noise)
        reference.compose(dp_accounting.GaussianDpEvent(noise))
    assert accountant.epsilon() == pytest.approx(reference.get_epsilon(1e-5), rel=1e-3)


def test_releases_share_the_budget():
    privacy = Privacy(epsilon=1.0, releases=4)
    aggregation = make_aggregation("plain", seed=0, privacy=privacy)
    for task in range(4):
        summation = aggregation.open(range(3), kind="statistics", path=(task, 0))
        summation.add(range(3), some_arrays(3))
        summation.close()
    assert aggregation.report()["epsilon"] == pytest.approx(1.0, abs=1e-6)


def test_private_updates_are_accounted_over_rounds_with_and_without_sampling():
    pytest.importorskip("dp_accounting")
    privacy = Privacy(noise=4.0, updates=True, amplify=True)
    aggregation = make_aggregation("plain", seed=0, privacy=privacy)
    for number in range(10):
        summation = aggregation.open(range(5), kind="update", path=(0, number), drawn_from=1000)
        summation.add(range(5), some_arrays(5))
        summation.close()
    report = aggregation.report()
    assert report["covers"] == ["statistics", "updates"]
    assert report["epsilon"] == pytest.approx(gaussian_epsilon(4 / math.sqrt(10), 1e-5), rel=1e-9)
    assert report["epsilon_released"] == pytest.approx(0.17255, abs=1e-4)
    assert report["epsilon_released"] < report["epsilon"] / 4


@pytest.mark.parametrize("kind", ["plain", "encoded"])
def test_private_sums_keep_types_bytes_and_checks(kind):
    arrays = {"a": torch.zeros(9, 7), "samples": torch.full((9,), 480)}
    privacy = Privacy(noise=0.01, clip=1e4)
    sums, _ = summed(kind, arrays, privacy)
    plain, _ = summed(kind, arrays, None)
    assert sums.arrays["samples"].dtype == torch.int64 and sums.arrays["a"].dtype == torch.float32
    # z L times the unit of samples: by that much the count may move, and by rounding no less.
    assert 1 < abs(sums.arrays["samples"].item() - 9 * 480) < 6 * 100 * 1000
    assert sums.bytes_up == plain.bytes_up and sums.clients == tuple(range(9))
    with pytest.raises(UserError, match="one row"):
        summed(kind, {"a": torch.zeros(9, 7), "b": torch.zeros(8)}, privacy)


def test_the_accountant_survives_a_checkpoint():
    privacy = Privacy(noise=3.0, amplify=True)
    aggregation = make_aggregation("plain", seed=0, privacy=privacy)
    summation = aggregation.open(range(5), kind="statistics", path=(0, 0), drawn_from=50)
    summation.add(range(5), some_arrays())
    summation.close()
    resumed = make_aggregation("plain", seed=0, privacy=privacy)
    resumed.restore(json.loads(json.dumps(aggregation.state())))
    assert resumed.report() == aggregation.report()
    assert resumed.accountant.releases == [(3.0, (5, 50))]


@pytest.mark.parametrize("kind", ["plain", "encoded", "secure"])
def test_a_client_that_is_not_finite_counts_as_one_that_sent_zeros(kind):
    privacy = Privacy(noise=0.01)
    broken, zeros = some_arrays(), some_arrays()
    broken["a"][1, 2, 0], broken["b"][3] = math.nan, math.inf
    for array in zeros.values():
        array[[1, 3]] = 0
    sums, aggregation = summed(kind, broken, privacy)
    reference, _ = summed(kind, zeros, privacy)
    assert sums.clients == tuple(range(5))
    for name in zeros:
        assert torch.equal(sums.arrays[name], reference.arrays[name])
    assert aggregation.report()["epsilon"] == pytest.approx(gaussian_epsilon(0.01, 1e-5))
    assert math.isnan(broken["a"][1, 2, 0])  # the caller's arrays are the caller's


def test_a_sum_without_a_draw_claims_no_sampling():
    for options, drawn_from in [({}, 1000), ({"amplify": True}, None), ({"amplify": True}, 5)]:
        aggregation = make_aggregation("plain", seed=0, privacy=Privacy(noise=4.0, **options))
        summation = aggregation.open(range(5), kind="statistics", path=(0, 0), drawn_from=drawn_from)
        summation.add(range(5), some_arrays())
        summation.close()
        report = aggregation.report()
        assert report["epsilon_released"] == report["epsilon"] == gaussian_epsilon(4.0, 1e-5)


def test_dp_accounting_is_asked_for_at_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    make_aggregation("plain", seed=0, privacy=Privacy())
    with pytest.raises(UserError, match="pip install"):
        make_aggregation("plain", seed=0, privacy=Privacy(amplify=True))


@pytest.mark.parametrize(
    ("options", "releases"),
    [({}, 3), ({"updates": True}, 23), ({"updates": True, "statistics": False}, 20), ({"releases": 7}, 7)],
)
def test_epsilon_is_shared_over_all_private_sums_of_the_run(options, releases):
    aggregation = make_aggregation("plain", seed=0, privacy=Privacy(epsilon=1.0, **options))
    aggregation.plan({"update": 20, "statistics": 3})
    assert aggregation.report()["noise"] == pytest.approx(gaussian_noise(1.0, 1e-5) * math.sqrt(releases))


def test_a_run_without_an_end_must_say_over_how_many_sums():
    with pytest.raises(UserError, match=r"dp\.releases"):
        make_aggregation("plain", seed=0, privacy=Privacy()).plan(None)
    for told in (Privacy(releases=3), Privacy(noise=1.0), Privacy(calibration="paper")):
        make_aggregation("plain", seed=0, privacy=told).plan(None)


def test_units():
    assert Privacy().scale("metric/loss") == 100.0 and Privacy().scale("conv.weight") == 1.0
    assert Privacy().scale("samples") == Privacy().scale("fc1/ratio") == 1000.0
    privacy = Privacy(scales={"metric/loss": 3.0, "*/energy": 20.0})
    assert privacy.scale("metric/loss") == 3.0 and privacy.scale("fc/energy") == 20.0


def test_sums_that_are_not_private_pass_through_and_are_not_claimed():
    privacy = Privacy(epsilon=1.0)
    sums, aggregation = summed("plain", some_arrays(), privacy, "update")
    plain, _ = summed("plain", some_arrays(), None, "update")
    assert torch.equal(sums.arrays["a"], plain.arrays["a"])
    assert aggregation.report()["covers"] == ["statistics"] and aggregation.report()["epsilon"] == 0.0


def test_missing_clients_take_their_noise_with_them_and_the_accountant_knows():
    privacy = Privacy(noise=2.0)
    _, aggregation = summed("encoded", some_arrays(3), privacy, cohort=range(4))
    assert aggregation.report()["epsilon"] == pytest.approx(gaussian_epsilon(2 * math.sqrt(3 / 4), 1e-5))


def test_settings_that_cannot_be_meant_are_refused():
    with pytest.raises(UserError, match="finite clip"):
        Privacy(clip=math.inf)
    with pytest.raises(UserError, match="epsilon must be positive"):
        Privacy(epsilon=0.0)
    for wrong in (
        {"epsilon": math.inf}, {"noise": -1.0}, {"noise": math.nan}, {"update_clip": 1e-300}, {"clip": -1.0},
        {"scales": {"*": 0.0}}, {"scales": {"a": math.inf}}, {"releases": -1}, {"delta": math.nan},
    ):  # fmt: skip
        with pytest.raises(UserError, match="dp"):
            Privacy(**wrong)
    with pytest.raises(UserError, match="analytic or paper"):
        Privacy(calibration="classical")
    with pytest.raises(UserError, match="too coarse"):
        summed("encoded", some_arrays(), Privacy(noise=1e-4, updates=True), "update", update_bits=16)
    with pytest.raises(UserError, match="exceeds its clip"):
        summed("encoded", some_arrays(), Privacy(noise=20.0, updates=True), "update")
    with pytest.raises(UserError, match="too coarse"):
        summed("encoded", some_arrays(), Privacy(updates=True, update_clip=1e-3), "update", update_bits=12)
