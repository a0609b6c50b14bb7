"""The specification is right by itself: each of its steps against the definition, then a whole run."""

from __future__ import annotations

import fot_minimal as fm
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class TwoHeads(nn.Module):
    """A small convolutional network with a head a task."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.fc = nn.Linear(27, 6, bias=False)
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](torch.relu(self.fc(torch.relu(self.conv(x)).flatten(1))))


def weights(model: nn.Module) -> fm.Weights:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def basis(d: int, k: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, k, dtype=torch.float64))[0]


def total(X: Tensor, O: Tensor, G: Tensor | None = None, n: int = 1) -> fm.Sketch:
    """One client's sketch of X by the definition; with G = I the sketch is X* itself."""
    X_star = X - O @ O.T @ X
    w = n * torch.linalg.norm(X_star) / torch.linalg.norm(X)
    A = X_star if G is None else X_star @ G
    return fm.Sketch(A, X_star.square().sum(), X.square().sum(), w, torch.tensor(float(n)))


# ---- layers


@pytest.mark.parametrize("stride, padding, dilation", [(1, 0, 1), (2, 1, 1), ((1, 2), (2, 0), 2)])
def test_columns_of_a_convolution_are_what_its_flattened_weight_multiplies(stride, padding, dilation):
    layer = nn.Conv2d(2, 3, (2, 3), stride=stride, padding=padding, dilation=dilation, bias=False).double()
    x = torch.randn(4, 2, 9, 8, dtype=torch.float64)
    H = layer.weight.flatten(1) @ fm.columns(layer, x)  # out x (samples · patches), sample by sample
    torch.testing.assert_close(H, layer(x).transpose(0, 1).flatten(1))


def test_columns_of_a_linear_layer_with_leading_dimensions():
    layer, x = nn.Linear(5, 3, bias=False), torch.randn(4, 7, 5)
    torch.testing.assert_close((layer.weight @ fm.columns(layer, x)).T, layer(x).reshape(28, 3))


def test_heads_are_not_protected_and_layer_inputs_are_those_of_the_given_weights():
    model = TwoHeads().double()
    assert list(fm.protected(model)) == ["conv", "fc"]
    x, W = torch.randn(5, 2, 6, 6, dtype=torch.float64), weights(model)
    W["conv.weight"] = 2 * W["conv.weight"]
    (first, X), (second, Y) = fm.layer_inputs(model, W, x, 0)
    assert (first, second, X.shape, Y.shape) == ("conv", "fc", (18, 45), (27, 5))
    hidden = torch.relu(nn.functional.conv2d(x, W["conv.weight"], W["conv.bias"], stride=2, padding=1))
    torch.testing.assert_close(Y.T, hidden.flatten(1))
    assert not any(layer._forward_pre_hooks for layer in model.modules())


# ---- training


def test_local_update_is_torch_sgd_and_leaves_other_heads_alone():
    model = TwoHeads().double()
    x, y = torch.randn(10, 2, 6, 6, dtype=torch.float64), torch.randint(4, (10,))
    orders = [torch.randperm(10), torch.randperm(10)]
    W = weights(model)
    δ = fm.local_update(model, W, x, y, 1, orders, fm.Settings(batch=4, lr=0.1, weight_decay=0.01))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    for order in orders:
        for rows in (order[:4], order[4:8], order[8:]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows], 1), y[rows]).backward()
            optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(W[name] + δ[name], value.detach(), rtol=0, atol=1e-12)
    assert not δ["heads.0.weight"].any() and δ["heads.1.weight"].any()


def test_fed_project_keeps_the_layers_output_on_protected_inputs_and_only_there():
    model = TwoHeads().double()
    W = weights(model)
    δ_sum = {name: torch.randn_like(value) for name, value in W.items()}
    O = {"conv": basis(18, 5), "fc": basis(27, 9)}
    after = fm.fed_project(W, δ_sum, 4, O)
    for layer, basis_ in O.items():
        before_, after_ = W[f"{layer}.weight"].flatten(1), after[f"{layer}.weight"].flatten(1)
        step = δ_sum[f"{layer}.weight"].flatten(1) / 4
        X = basis_ @ torch.randn(basis_.shape[1], 3, dtype=torch.float64)
        torch.testing.assert_close(after_ @ X, before_ @ X)
        Y = torch.randn(len(basis_), 3, dtype=torch.float64)
        Y -= basis_ @ basis_.T @ Y
        torch.testing.assert_close(after_ @ Y, (before_ + step) @ Y)
    for free in ("conv.bias", "heads.0.weight", "heads.1.bias"):
        torch.testing.assert_close(after[free], W[free] + δ_sum[free] / 4)


# ---- GPSE


class Recorded(fm.Draws):
    """Draws that keep the clients they were to choose from and the Gaussians they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []
        self.given: dict[tuple[int, int, str], list[Tensor]] = {}

    def cohort(self, task, round, clients, size):
        self.asked.append(list(clients))
        return super().cohort(task, round, clients, size)

    def gaussian(self, task, client, layer, batch, n, s):
        drawn = self.given.setdefault((task, client, layer), [])
        assert batch == len(drawn)
        drawn.append(super().gaussian(task, client, layer, batch, n, s))
        return drawn[-1]


def test_the_clients_streamed_sketches_add_up_to_the_sketch_of_all_data():
    model, draws = TwoHeads().double().eval(), Recorded()
    W, x = weights(model), torch.randn(10, 2, 6, 6, dtype=torch.float64)
    O, o = {"conv": basis(18, 4), "fc": basis(27, 4)}, fm.Settings(sketch_batch=3, sampling=2)
    clients = {0: x[:4], 7: x[4:]}
    first, second = (fm.sketch(model, W, x_i, 0, i, O, o, draws) for i, x_i in clients.items())
    summed = fm.add(first, second)
    for name, X in fm.layer_inputs(model, W, x, 0):
        G = torch.cat(draws.given[0, 0, name] + draws.given[0, 7, name])
        assert G.shape == (X.shape[1], 2 * X.shape[0])
        expected = total(X, O[name], G)
        torch.testing.assert_close(summed[name].A, expected.A)
        torch.testing.assert_close(summed[name].e_star, expected.e_star)
        torch.testing.assert_close(summed[name].e, expected.e)
        assert summed[name].n == 10
        each = [dict(fm.layer_inputs(model, W, x_i, 0))[name] for x_i in clients.values()]
        n_w = sum(total(X_i, O[name], n=n).n_w for X_i, n in zip(each, (4, 6), strict=True))
        torch.testing.assert_close(summed[name].n_w, n_w)


@settings(max_examples=60, deadline=None)
@given(
    σ=st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(any),
    e_star=st.floats(0, 1),
    w=st.floats(0, 1),
    th=st.floats(0.05, 0.999),
)
def test_rank_is_the_smallest_that_satisfies_the_rule(σ, e_star, w, th):
    σ2 = torch.tensor(sorted(σ, reverse=True), dtype=torch.float64).square()
    if not σ2.sum() > 1e-200:
        return
    sums = fm.Sketch(σ2, *(torch.tensor(v, dtype=torch.float64) for v in (3 * e_star, 3.0, 7 * w, 7.0)))
    share = [float(σ2[:r].sum() / σ2.sum()) for r in range(len(σ) + 1)]
    for rule, weight in (("energy", e_star), ("authors", w)):
        covered = [(1 - weight) + weight * s for s in share]
        if min(abs(c - th) for c in covered) < 1e-12:
            continue  # on the edge rounding decides
        enough = [r for r, c in enumerate(covered) if c > th and (r > 0 or rule == "energy")]
        assert fm.rank(σ2, sums, th, rule) == enough[0]


def test_the_rules_differ_on_the_edge():
    σ2 = torch.tensor([3.0, 1.0], dtype=torch.float64)  # the first direction holds .75 exactly
    sums = fm.Sketch(σ2, *torch.ones(4, dtype=torch.float64))
    assert fm.rank(σ2, sums, 0.75, "energy") == 1
    assert fm.rank(σ2, sums, 0.75, "authors") == 2
    with pytest.raises(ValueError, match="energy or authors"):
        fm.rank(σ2, sums, 0.75, "printed")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), d=st.integers(2, 9), share=st.floats(0, 1), th=st.floats(0.1, 0.999))
def test_expand_covers_the_threshold_with_no_direction_to_spare(seed, d, share, th):
    torch.manual_seed(seed)
    O = basis(d, int(share * d))
    k = O.shape[1]
    X = torch.randn(d, d, dtype=torch.float64) * torch.logspace(0, -2, d, dtype=torch.float64)[:, None]
    new = fm.expand(O, total(X, O), th, "energy")

    def covered(B: Tensor) -> float:
        return float((B.T @ X).square().sum() / X.square().sum())

    torch.testing.assert_close(new.T @ new, torch.eye(new.shape[1], dtype=torch.float64))
    torch.testing.assert_close(new[:, :k], O)
    assert covered(new) >= th - 1e-9
    if new.shape[1] > k:
        assert covered(new[:, :-1]) < th
    authors = fm.expand(O, total(X, O), th, "authors")
    assert min(k + 1, d) <= authors.shape[1] <= d


def test_a_gaussian_sketch_finds_the_subspace_that_the_data_span():
    B, O = basis(20, 3), torch.zeros(20, 0, dtype=torch.float64)
    X = B @ torch.randn(3, 500, dtype=torch.float64)
    G = torch.randn(500, 20, dtype=torch.float64)
    new = fm.expand(O, total(X, O, G), 1 - 1e-9, "energy")
    torch.testing.assert_close(new @ new.T, B @ B.T)
    assert fm.expand(new, total(X, new, G), 0.99, "energy").shape == (20, 3)  # nothing new, nothing added


# ---- the run


def toy(method: str, **changes: object) -> fm.Result:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 50), nn.ReLU(), nn.Linear(50, 10))
    return fm.run(network, fm.toy_tasks(), fm.Settings(lr=0.1, rounds=25, **changes), method)


def test_fot_forgets_less_than_fedavg_and_learns_the_new_task():
    fedavg, fot = toy("fedavg"), toy("fot")
    assert fedavg.accuracy[0][0] == fot.accuracy[0][0] > 90  # the same first task, draw for draw
    assert fedavg.fgt > 5 and fot.fgt < fedavg.fgt / 2
    assert fot.accuracy[1][0] > fedavg.accuracy[1][0] - 3
    assert all(O.shape[1] == 0 for O in fedavg.O.values())
    assert all(0 < O.shape[1] < O.shape[0] for O in fot.O.values())


def test_a_full_basis_freezes_the_old_task_entirely(monkeypatch):
    monkeypatch.setattr(fm, "rank", lambda σ2, *_: len(σ2))
    model = TwoHeads().double()
    tasks = conv_tasks()
    alone, both = (fm.run(model, tasks[:k], fm.Settings(rounds=3, cohort=2, lr=0.1)) for k in (1, 2))
    assert [O.shape[1] for O in alone.O.values()] == [0, 0]  # nothing is extracted after the last task
    assert [O.shape for O in both.O.values()] == [(18, 18), (27, 27)]
    for name in ("conv.weight", "fc.weight", "heads.0.weight"):
        torch.testing.assert_close(both.W[name], alone.W[name])
    for name in ("conv.bias", "heads.1.weight"):
        assert not torch.allclose(both.W[name], alone.W[name])


def test_gpse_follows_the_threshold_schedule_in_eval_mode_on_the_clients_that_hold_data(monkeypatch):
    seen = []

    def expand(O, total, th, rule):
        seen.append((th, float(total.n), model.training))
        return O

    monkeypatch.setattr(fm, "expand", expand)
    first, second = conv_tasks()
    model = TwoHeads().double()
    model.heads.append(nn.Linear(6, 4).double())
    o = fm.Settings(rounds=1, cohort=9, threshold=0.5, increment=0.25)
    draws = Recorded()
    fm.run(model, [first, second, first], o, draws=draws)
    assert seen == 2 * [(0.5, 12.0, False)] + 2 * [(0.75, 12.0, False)]
    assert draws.asked == 3 * [[0, 2]]  # client 1 holds nothing


def conv_tasks() -> list[fm.Task]:
    def make() -> fm.Task:
        x, y = torch.randn(12, 2, 6, 6, dtype=torch.float64), torch.randint(4, (12,))
        return fm.Task(x, y, x, y, [torch.arange(5), torch.arange(0), torch.arange(5, 12)])

    return [make(), make()]


def test_acc_and_fgt_by_hand():
    result = fm.Result({}, {}, [[90.0, 70.0, 60.0], [80.0, 85.0], [77.0]])
    assert result.acc == pytest.approx((60 + 85 + 77) / 3)
    assert result.fgt == pytest.approx((30 - 5) / 2)
