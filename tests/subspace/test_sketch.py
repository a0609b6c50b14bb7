"""The client's sketch: what it computes, what it draws, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fot.errors import UserError
from fot.layers import Layer, find_layers
from fot.subspace import Sketch, SubspaceMemory, sample_size, sketch

Tree = dict[str, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(54, 5),
    ).double()


def orthonormal(groups: int, d: int, r: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(groups, d, r, generator=draw, dtype=torch.float64)).Q


def linear(d: int) -> tuple[nn.Module, tuple[Layer, ...]]:
    model = nn.Linear(d, 2, bias=False).double()
    return model, find_layers(model).layers


def data(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summed(parts: list[Tree]) -> Tree:
    return {name: sum((part[name] for part in parts), torch.zeros(())) for name in parts[0]}


def test_exact_sums_are_those_of_the_definition() -> None:
    model, x = network(), data(7, 4, 6, 6)
    layers = find_layers(model).layers
    bases = {"0": orthonormal(2, 18, 4), "5": orthonormal(1, 54, 10)}
    arrays = sketch(model, x.split(3), layers, bases, size="d", key=1, exact=True)
    hidden = model.eval()[:5](x)
    patches = nn.functional.unfold(x, 3, stride=2, padding=1).transpose(0, 1).reshape(2, 18, -1)
    for name, X in {"0": patches, "5": hidden.mT.unsqueeze(0)}.items():
        O = bases[name]
        residual = X - O @ O.mT @ X
        torch.testing.assert_close(arrays[f"{name}/gram"], residual @ residual.mT)
        torch.testing.assert_close(arrays[f"{name}/energy"], (X**2).sum(dim=(1, 2)))
        torch.testing.assert_close(arrays[f"{name}/residual"], (residual**2).sum(dim=(1, 2)))
        expected = 7 * ((residual**2).sum(dim=(1, 2)) / (X**2).sum(dim=(1, 2))).sqrt()
        torch.testing.assert_close(arrays[f"{name}/ratio"], expected)
        assert f"{name}/sketch" not in arrays
    assert arrays["samples"].item() == 7
    assert arrays["samples"].dtype == arrays["0/energy"].dtype == torch.float64


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([1 << 22, 1 << 12, 1]))
def test_a_sketch_does_not_depend_on_how_samples_are_cut_into_batches(sizes: list[int], chunk: int) -> None:
    model, n = network(), sum(sizes)
    layers, x = find_layers(model).layers, data(n, 4, 6, 6)
    whole = sketch(model, [x], layers, {}, size="2d", key=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Sketch.update.__wrapped__.__globals__, "CHUNK", chunk)
        cut = sketch(model, x.split(sizes), layers, {}, size="2d", key=3)
    assert whole["0/sketch"].shape == (2, 18, 36)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], atol=1e-9, rtol=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=5),
    st.integers(1, 200),
    st.sampled_from([1 << 22, 1 << 14, 1 << 10]),
    st.booleans(),
)
def test_clients_sketched_together_give_the_sum_of_their_sketches(
    sizes: list[int], batch: int, chunk: int, exact: bool
) -> None:
    model, x = network(), data(sum(sizes), 4, 6, 6)
    layers, parts = find_layers(model).layers, x.split(sizes)
    bases = {"0": orthonormal(2, 18, 4)}
    keys = [client % 3 for client in range(len(sizes))]  # some share a draw
    wanted = summed(
        [
            sketch(model, [part], layers, bases, size="2d", key=key, exact=exact)
            for part, key in zip(parts, keys, strict=True)
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Sketch.update.__wrapped__.__globals__, "CHUNK", chunk)
        got = sketch(
            model, x.split(batch), layers, bases, size="2d", key=keys, exact=exact, samples=sizes
        )  # fmt: skip
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], atol=1e-9, rtol=1e-12)


def test_samples_that_are_not_the_clients_are_refused() -> None:
    model, layers = linear(5)
    for sizes in ([2, 3], [2, 1], [3, 0]):
        with pytest.raises(UserError, match="the batches 4"):
            sketch(model, [data(4, 5)], layers, {}, size="d", key=[0, 1], samples=sizes)
    for key, sizes in (([0, 1], []), ([0], [2, 2]), (0, [2, 2])):
        with pytest.raises(UserError, match="a key and a number of samples each"):
            sketch(model, [data(4, 5)], layers, {}, size="d", key=key, samples=sizes)


def test_many_rows_take_few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution has hundreds of patches a sample, and on a GPU each draw is a launch of its own."""
    drawn = []
    normal = Tensor.normal_

    def note(self: Tensor, **options: Any) -> Tensor:
        drawn.append(len(self))
        return normal(self, **options)

    monkeypatch.setattr(Tensor, "normal_", note)
    model = nn.Conv1d(1, 2, 3)
    for n, most in ((3, 7), (40, 40), (400, 70)):  # of 500 patches each
        drawn.clear()
        sketch(model, data(n, 1, 502).float().split(7), find_layers(model).layers, {}, size="d", key=0)
        assert len(drawn) <= most + 8 and 500 * n <= sum(drawn) <= 500 * n * 1.13 + 128


def test_the_same_key_gives_the_same_bytes_and_another_does_not() -> None:
    model, x = network(), data(9, 4, 6, 6)
    layers = find_layers(model).layers
    one, same, other = (sketch(model, [x], layers, {}, size=11, key=key) for key in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.allclose(one["0/sketch"], other["0/sketch"])
    assert torch.equal(one["0/energy"], other["0/energy"])


def test_layers_and_groups_draw_apart() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 4, 1, groups=2)).double()
    sums = Sketch(find_layers(model).layers, {}, size=5, key=1, dtype=torch.float64)
    for layer in sums.layers:
        sums.update(layer, torch.ones(1, 4, 1).double())
    arrays = sums.result(samples=1)
    draws = [arrays["0/sketch"][0, 0], arrays["0/sketch"][1, 0], arrays["1/sketch"][0, 0]]
    assert not any(torch.allclose(a, b) for a, b in zip(draws, draws[1:] + draws[:1], strict=True))


@pytest.mark.parametrize("split", [[60], [1, 59], [20, 20, 20], [1] * 60])
def test_the_sum_over_clients_has_one_law_however_samples_are_spread(split: list[int]) -> None:
    """Its columns are independent N(0, X* X*ᵀ): whitened, they are standard normal numbers."""
    d, s = 6, 4000
    model, layers = linear(d)
    x = data(60, d) * torch.arange(1, d + 1) + 1  # uneven, and off centre: clients' columns do not cancel
    O = orthonormal(1, d, 2)
    parts = x.split(split)
    total = summed([sketch(model, [p], layers, {"": O}, size=s, key=i) for i, p in enumerate(parts)])
    rest = torch.linalg.svd(O[0], full_matrices=True).U[:, 2:]  # the complement of O
    white = torch.linalg.inv(torch.linalg.cholesky(rest.mT @ x.mT @ x @ rest)) @ rest.mT @ total["/sketch"][0]
    assert (white @ white.mT / s - torch.eye(d - 2)).abs().max() < 5 / s**0.5
    assert stats.kstest(white.flatten().numpy(), "norm").pvalue > 0.001
    assert (O[0].mT @ total["/sketch"][0]).abs().max() < 1e-9
    assert total["/residual"].item() == pytest.approx(float(((x @ rest) ** 2).sum()))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.02, 0.05, 0.1]),
    st.sampled_from(["d", "5d"]),
    st.integers(1, 8),
)
def test_the_leading_subspace_meets_the_exact_one_within_the_stated_angle(
    seed: int, gap: float, size: str, k: int
) -> None:
    d, n = 64, 200
    model, layers = linear(d)
    left, right = orthonormal(1, d, d, seed)[0], orthonormal(1, n, d, seed + 1)[0]
    sigma = torch.cat([torch.ones(k), torch.full((d - k,), gap)]).double()
    x = right * sigma @ left.mT
    arrays = sketch(model, [x], layers, {}, size=size, key=seed)
    leading = torch.linalg.svd(arrays["/sketch"][0]).U[:, :k]
    cosine = torch.linalg.svdvals(left[:, :k].mT @ leading).min().clamp(max=1)
    stretch = {"d": 1, "5d": 5}[size]
    assert (1 - cosine**2).sqrt() <= 4 * gap / stretch**0.5


def test_the_sketch_and_the_exact_gram_agree_in_the_mean() -> None:
    model, layers = linear(5)
    x = data(300, 5) * torch.arange(1, 6)
    arrays = sketch(model, [x], layers, {}, size=20_000, key=0)
    gram = arrays["/sketch"] @ arrays["/sketch"].mT / 20_000
    exact = sketch(model, [x], layers, {}, size=20_000, key=0, exact=True)["/gram"]
    assert (gram - exact).norm() < 0.03 * exact.norm()


def test_a_client_without_data_adds_nothing() -> None:
    model = network()
    layers = find_layers(model).layers
    for batches in ([], [data(0, 4, 6, 6)]):
        arrays = sketch(model, batches, layers, {}, size="d", key=0)
        assert arrays["0/sketch"].shape == (2, 18, 18)
        assert all(not array.any() for array in arrays.values())


def test_zero_inputs_give_zeros_and_no_nan() -> None:
    model, layers = linear(5)
    arrays = sketch(model, [torch.zeros(3, 5).double()], layers, {}, size="d", key=0)
    assert arrays.pop("samples").item() == 3
    assert all(not array.any() for array in arrays.values())


def test_one_sample_has_a_sketch_of_rank_one() -> None:
    model, layers = linear(5)
    arrays = sketch(model, [data(1, 5)], layers, {}, size="d", key=0)
    assert torch.linalg.matrix_rank(arrays["/sketch"]).item() == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("exact", [False, True])
def test_inputs_that_are_not_finite_are_refused(bad: float, exact: bool) -> None:
    model, layers = linear(5)
    x = data(4, 5)
    x[2, 3] = bad
    with pytest.raises(UserError, match="received NaN, infinite"):
        sketch(model, [x], layers, {}, size="d", key=0, exact=exact)


def test_the_model_is_left_as_it_was() -> None:
    model = network().train()
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    arrays = sketch(model, [data(4, 4, 6, 6)], find_layers(model).layers, {}, size="d", key=0)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(array.requires_grad for array in arrays.values())
    with pytest.raises(RuntimeError):
        sketch(model, [data(4, 3, 6, 6)], find_layers(model[5:]).layers, {}, size="d", key=0)
    assert [module.training for module in model.modules()] == flags


def test_dataloader_batches_and_a_forward_of_ones_own() -> None:
    model, layers = linear(5)
    x = data(4, 5)
    plain = sketch(model, [x], layers, {}, size="d", key=0)
    pairs = sketch(model, [(x, torch.zeros(4))], layers, {}, size="d", key=0)
    doubled = sketch(model, [x], layers, {}, size="d", key=0, forward=lambda inputs: model(2 * inputs))
    for name, factor in {"/sketch": 2, "/energy": 4, "/ratio": 1, "samples": 1}.items():
        torch.testing.assert_close(pairs[name], plain[name])
        torch.testing.assert_close(doubled[name], factor * plain[name])


def test_half_precision_is_sketched_in_float32() -> None:
    model = nn.Linear(5, 2).bfloat16()
    x = data(50, 5).bfloat16()
    arrays = sketch(model, [x], find_layers(model).layers, {}, size="d", key=0, exact=True)
    assert arrays["/gram"].dtype == torch.float32
    torch.testing.assert_close(arrays["/gram"][0], x.float().mT @ x.float())


def test_autocast_around_the_forward_does_not_reach_the_sketch() -> None:
    model = nn.Linear(5, 2)
    x = data(50, 5).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        arrays = sketch(model, [x], find_layers(model).layers, {}, size="d", key=0, exact=True)
    torch.testing.assert_close(arrays["/gram"][0], x.mT @ x)


@pytest.mark.parametrize(
    "size", [0, -3, "x", "d5", "0d", "-1d", 2.5, None, True, {"conv*": 3}, {"*": "0.01d"}]
)
def test_sizes_that_are_none_are_refused(size: object) -> None:
    with pytest.raises(UserError, match="sketch size"):
        sample_size(linear(20)[1][0], size)  # type: ignore[arg-type]


def test_a_whole_number_of_numpy_is_a_size() -> None:
    size = sample_size(linear(20)[1][0], {"*": np.int64(7)})  # type: ignore[dict-item]
    assert size == 7 and type(size) is int


def test_a_lone_user_needs_these_two_rooms_alone() -> None:
    """The whole algorithm beside a training loop of one's own: task 2 does not change task 1's outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3))
    memory = SubspaceMemory.empty(find_layers(model, bias=True).layers)
    old = torch.randn(200, 8) @ torch.randn(8, 30)
    before = model(old).detach()
    sums = sketch(model, old.split(50), memory.layers, memory.bases, size="5d", key=0)
    memory, growth = memory.expand(sums, threshold=1.0)
    assert growth["0"].rank == 9  # eight directions and the bias
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(100, 30)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update = memory.project({name: p.detach() - start[name] for name, p in model.named_parameters()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name] + update[name])
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    torch.testing.assert_close(model(old), before, atol=1e-4, rtol=0)
