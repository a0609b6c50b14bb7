from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.aggregation import make_aggregation
from fot.aggregation.codec import Codec, Coding, from_words, pack, packed_size, to_words, unpack
from fot.errors import UserError

codings = st.builds(
    lambda bits, clip, clients: Coding.of(bits=bits, clip=clip, clients=clients),
    bits=st.integers(16, 64),
    clip=st.floats(1e-3, 1e6),
    clients=st.integers(1, 1024),
)


def test_known_answers():
    coding = Coding.of(bits=32, clip=4.0, clients=64)
    assert (coding.fraction, coding.limit) == (23, 2**25 - 1)
    integers, clipped = coding.encode(torch.tensor([0.0, 1.0, -1.0, 2.0**-23, 2.0**-25, 4.0, -5.0]))
    assert integers.tolist() == [0, 2**23, -(2**23), 1, 0, 2**25 - 1, -(2**25) + 1] and clipped == 2
    assert (
        to_words(integers, 32).tobytes().hex() == "0000000000008000000080ff0100000000000000ffffff01010000fe"
    )
    assert pack(to_words(torch.tensor([1, -1, 5, 0]), 6), 6).hex() == "07f140"


def test_clip_is_the_range_but_for_one_step():
    for bits, clip, clients in [(32, 4.0, 64), (32, 3.0, 25), (64, 2.0**32, 150), (26, 1.0, 1024)]:
        coding = Coding.of(bits=bits, clip=clip, clients=clients)
        assert clip - coding.step <= coding.limit * coding.step <= clip
        assert 4 * coding.limit * clients >= 2 ** (bits - 1)  # at least a quarter of the ring is used


@settings(max_examples=100, deadline=None)
@given(codings, st.integers(1, 1024))
def test_overflow_is_impossible(coding, clients):
    coding = Coding.of(bits=coding.bits, clip=coding.step * coding.limit, clients=clients)
    extreme, _ = coding.encode(torch.tensor([1e300, -1e300], dtype=torch.float64))
    total = sum(int(extreme[0]) for _ in range(clients))
    assert total < 2 ** (coding.bits - 1) and clients * int(extreme[1]) > -(2 ** (coding.bits - 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([20, 26, 32, 48, 64]))
def test_error_of_a_sum_is_bounded(seed, clients, bits):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(clients, 50, dtype=torch.float64, generator=generator) - 1
    codec = Codec(update_bits=bits, update_clip=1.5)
    coding = codec.coding("update", "x", (50,), clients)
    summation = make_aggregation("encoded", seed=0, update_bits=bits, update_clip=1.5).open(
        range(clients), kind="update", path=(0,)
    )
    summation.add(range(clients), {"x": x})
    sums = summation.close()
    error = (sums.arrays["x"] - x.sum(0)).abs().max().item()
    assert sums.clipped == 0
    assert error <= clients * coding.step / 2 + clients * 2.0**-52 * clients
    assert coding.step <= 4 * 1.5 * clients / 2 ** (bits - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 64), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
def test_packing_round_trip(bits, values):
    half = 2 ** (bits - 1)
    values = [(v + half) % (2 * half) - half for v in values]
    words = to_words(torch.tensor(values, dtype=torch.int64), bits)
    data = pack(words, bits)
    assert len(data) == packed_size((bits, len(values)))
    assert from_words(unpack(data, (bits, len(values))), bits).tolist() == values


def test_sums_wrap_back_from_a_narrow_ring():
    words = to_words(torch.tensor([-3, 5]), 26) + to_words(torch.tensor([1, -7]), 26)
    assert from_words(words, 26).tolist() == [-2, -2]
    assert from_words(np.array([2**25, 2**26 + 1], np.uint32), 26).tolist() == [-(2**25), 1]


def test_clipping_is_counted_over_all_clients():
    summation = make_aggregation("encoded", seed=0).open([0, 1, 2], kind="update", path=(0,))
    summation.add([0, 1], {"w": torch.tensor([[9.0, 1.0], [-9.0, 9.0]])})
    sums = summation.close()
    assert sums.clipped == 3
    torch.testing.assert_close(sums.arrays["w"], torch.tensor([0.0, 5.0]), rtol=0, atol=1e-6)


def test_scalars_of_updates_are_wide_and_clips_can_be_named():
    summation = make_aggregation("encoded", seed=0, clips={"big": 100.0}).open(
        [0, 1], kind="update", path=(0,)
    )
    arrays = {
        "samples": torch.tensor([480, 479]),
        "loss": torch.tensor([1e6, 0.1]),
        "big": torch.full((2, 1), 50.0),
    }
    summation.add([0, 1], arrays)
    sums = summation.close()
    assert sums.clipped == 0
    assert sums.arrays["samples"].item() == 959 and sums.arrays["samples"].dtype == torch.int64
    assert sums.arrays["loss"].item() == pytest.approx(1000000.1, rel=1e-7)
    assert sums.arrays["big"].item() == pytest.approx(100.0, abs=1e-5)
    assert sums.bytes_up == 8 + 8 + 4


def test_clips_go_by_patterns_and_one_that_meets_nothing_is_told():
    aggregation = make_aggregation("encoded", seed=0, clips={"*/bias": 8.0, "fc*": 2.0, "conv*": 1.0})
    assert aggregation.codec.coding("update", "fc1/bias", (3,), clients=1).limit == 2**31 - 1
    steps = {n: aggregation.codec.coding("update", n, (3,), clients=1).step for n in ("fc1/bias", "fc1", "x")}
    assert steps["fc1/bias"] == 4 * steps["fc1"] and steps["x"] == 2 * steps["fc1"]  # the first that matches
    (note,) = aggregation.notes()
    assert "'conv*'" in note


def test_bad_settings_are_refused():
    for value in ("nan", "inf", "-inf"):
        with pytest.raises(UserError, match="not finite"):
            Coding.of(bits=32, clip=1.0, clients=2).encode(torch.tensor([0.5, float(value), 0.1]))
    assert Coding.of(bits=32, clip=1.0, clients=2).encode(torch.zeros(0))[0].shape == (0,)
    with pytest.raises(UserError, match="wider ring"):
        Coding.of(bits=8, clip=1.0, clients=1000)
    with pytest.raises(UserError, match="from 2 to 64"):
        Coding.of(bits=65, clip=1.0, clients=2)
    with pytest.raises(UserError, match="1e-30 to 1e30"):
        Coding.of(bits=32, clip=0.0, clients=2)
