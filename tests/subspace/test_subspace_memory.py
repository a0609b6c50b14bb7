"""The server's memory: its invariants over many tasks, and what a projected update leaves alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fot.errors import UserError
from fot.layers import Layer, find_layers
from fot.subspace import SubspaceMemory, sketch, threshold_at

Tree = dict[str, Tensor]

LAYERS = {
    "linear": (lambda: nn.Linear(12, 5), (12,)),
    "tokens": (lambda: nn.Linear(12, 5), (3, 12)),
    "conv1d same": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2), (4, 9)),
    "conv2d stride": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 5, 6)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2), padding=(2, 1)), (4, 5, 6)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 4, 4)),
    "conv2d circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (4, 4, 4)),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect", stride=3), (4, 4, 4)),
    "conv3d replicate": (
        lambda: nn.Conv3d(2, 4, 2, padding=1, padding_mode="replicate", groups=2),
        (2, 2, 3, 2),
    ),
}


def extract(
    memory: SubspaceMemory,
    model: nn.Module,
    x: Tensor,
    *,
    key: int = 0,
    size: str = "5d",
    exact: bool = False,
) -> Tree:
    return sketch(model, [x], memory.layers, memory.bases, size=size, key=key, exact=exact)


def orthonormality(basis: Tensor) -> float:
    """The largest entry of OᵀO - I, zero columns left out."""
    worst = 0.0
    for O in basis.double():
        O = O[:, (O != 0).any(dim=0)]
        worst = max([worst, *(O.mT @ O - torch.eye(O.shape[1])).abs().flatten().tolist()])
    return worst


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(LAYERS)),
    st.booleans(),
    st.sampled_from(["energy", "authors"]),
    st.lists(st.tuples(st.floats(0.3, 1.0), st.integers(1, 5)), min_size=1, max_size=12),
    st.booleans(),
)
def test_bases_stay_orthonormal_and_within_d_over_many_expansions(
    kind: str, bias: bool, rule: str, tasks: list[tuple[float, int]], exact: bool
) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    model = make()
    memory = SubspaceMemory.empty(find_layers(model, bias=bias).layers)
    (layer,) = memory.layers
    for task, (threshold, n) in enumerate(tasks):
        before = memory.bases[""].double()
        sums = extract(memory, model, torch.randn(n, *shape) * 10 ** (task % 5 - 2), key=task, exact=exact)
        memory, growth = memory.expand(sums, threshold=threshold, rule=rule, key=task, size="2d")
        basis = memory.bases[""]
        assert basis.dtype == torch.float32
        assert orthonormality(basis) < 1e-6
        assert basis.shape[-1] <= layer.dimension
        rank = growth[""].rank
        assert rank == int((basis != 0).any(dim=1).sum()) <= growth[""].dimension
        assert growth[""].dimension == layer.groups * layer.dimension
        assert growth[""].added == rank - int((before != 0).any(dim=1).sum()) >= 0
        assert memory.usage() == {"": 100 * rank / growth[""].dimension}
        assert memory.frozen() == (("",) if rank == growth[""].dimension else ())
        O = basis.double()
        torch.testing.assert_close(O @ (O.mT @ before), before, atol=1e-6, rtol=0)  # nothing is forgotten


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(LAYERS)), st.booleans(), st.integers(0, 99), st.integers(1, 4))
def test_a_projected_update_leaves_the_outputs_on_the_stored_subspace(
    kind: str, bias: bool, seed: int, n: int
) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(seed)
    model = make()
    x = torch.randn(n, *shape)
    memory = SubspaceMemory.empty(find_layers(model, bias=bias).layers)
    memory, _ = memory.expand(extract(memory, model, x), threshold=1.0)
    update = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    if not bias:
        update["bias"].zero_()
    projected = memory.project(update)
    mixture = torch.randn(n)
    mixture = mixture / mixture.sum() if bias else mixture  # with a bias: weights that sum to one
    inside = torch.cat([x, torch.einsum("n,n...->...", mixture, x).unsqueeze(0)])
    old = model(inside)
    new = torch.func.functional_call(
        model, {name: p + projected[name] for name, p in model.named_parameters()}, inside
    )
    scale = 1 + float(inside.abs().max())
    torch.testing.assert_close(new, old, atol=1e-5 * scale, rtol=0)
    layer, O = memory.layers[0], memory.bases[""]
    assert (layer.matrix(projected) @ O).abs().max() < 1e-5
    # What is outside the subspace passes whole: Delta minus its projection lies in the subspace.
    removed = layer.matrix(update) - layer.matrix(projected)
    torch.testing.assert_close(removed @ O @ O.mT, removed, atol=1e-5, rtol=0)


def grown(threshold: float = 0.9, bias: bool = False) -> tuple[nn.Module, SubspaceMemory]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
    memory = SubspaceMemory.empty(find_layers(model, bias=bias).layers)
    memory, _ = memory.expand(extract(memory, model, torch.randn(6, 4, 4, 4)), threshold=threshold)
    return model, memory


def test_project_is_linear_idempotent_and_takes_a_cohort_at_once() -> None:
    model, memory = grown(bias=True)
    cohort = {name: torch.randn(3, *p.shape) for name, p in model.named_parameters()}
    stacked = memory.project(cohort)
    alone = [memory.project({name: u[i] for name, u in cohort.items()}) for i in range(3)]
    of_mean = memory.project({name: u.mean(0) for name, u in cohort.items()})
    again = memory.project(stacked)
    for name in cohort:
        torch.testing.assert_close(stacked[name], torch.stack([tree[name] for tree in alone]))
        torch.testing.assert_close(stacked[name].mean(0), of_mean[name], atol=1e-6, rtol=0)
        torch.testing.assert_close(again[name], stacked[name], atol=1e-6, rtol=0)
        assert not torch.allclose(stacked[name], cohort[name])


def test_project_passes_all_else_and_allows_missing_layers() -> None:
    _, memory = grown()
    update = {"3.bias": torch.ones(5), "heads.0.weight": torch.ones(2, 2), "0.weight": torch.ones(6, 2, 3, 3)}
    given = {name: tensor.clone() for name, tensor in update.items()}
    projected = memory.project(update)
    assert list(projected) == list(update)
    assert projected["3.bias"] is update["3.bias"]
    assert projected["heads.0.weight"] is update["heads.0.weight"]
    assert all(torch.equal(update[name], given[name]) for name in given)
    empty = SubspaceMemory.empty(memory.layers)
    assert empty.project(update)["0.weight"] is update["0.weight"]


def test_project_keeps_the_dtype_of_the_update() -> None:
    _, memory = grown()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert memory.project({"3.weight": torch.ones(5, 24, dtype=dtype)})["3.weight"].dtype == dtype


@pytest.mark.parametrize("update", [{"3.weight": torch.ones(24, 5)}, {"3.weight": torch.ones(())}])
def test_an_update_of_the_wrong_shape_is_refused(update: Tree) -> None:
    with pytest.raises(UserError, match=r"3\.weight.*not \(5, 24\)"):
        grown()[1].project(update)


def test_a_full_layer_is_frozen_exactly_and_says_so() -> None:
    model = nn.Linear(6, 4)
    memory = SubspaceMemory.empty(find_layers(model).layers)
    memory, growth = memory.expand(extract(memory, model, torch.randn(50, 6)), threshold=1.0)
    assert growth[""].frozen and memory.frozen() == ("",) and memory.usage() == {"": 100.0}
    assert not memory.project({"weight": torch.randn(4, 6)})["weight"].any()
    memory, growth = memory.expand(extract(memory, model, torch.randn(50, 6)), threshold=1.0, rule="authors")
    assert growth[""].added == 0 and growth[""].covered == 100


def test_a_full_layer_is_not_sketched_and_leaves_the_draws_of_the_others() -> None:
    model, memory = grown()
    x = torch.randn(6, 4, 4, 4)
    frozen = memory.freeze("0")
    arrays, usual = extract(frozen, model, x), extract(memory, model, x)
    assert set(arrays) == {"3/sketch", "3/residual", "3/energy", "3/ratio", "samples"}
    assert all(torch.equal(arrays[name], usual[name]) for name in arrays)
    assert frozen.expand(arrays, threshold=0.99)[1]["0"].added == 0


def test_a_layer_with_one_full_group_is_still_trained_in_the_other() -> None:
    model = nn.Conv1d(4, 4, 1, groups=2)
    memory = SubspaceMemory.empty(find_layers(model).layers)
    x = torch.randn(1, 4, 9)
    x[:, 3] = x[:, 2]
    memory, growth = memory.expand(extract(memory, model, x), threshold=1.0)
    assert growth[""].rank == 3 and not growth[""].frozen and memory.frozen() == ()
    projected = memory.project({"weight": torch.ones(4, 2, 1) * torch.tensor([[1.0], [0.0]])})["weight"][
        ..., 0
    ]
    torch.testing.assert_close(projected, torch.tensor([[0.0, 0], [0, 0], [0.5, -0.5], [0.5, -0.5]]))
    assert "/sketch" in extract(memory, model, x)


def test_freezing_a_layer() -> None:
    _, memory = grown()
    frozen = memory.freeze("0")
    assert frozen.frozen() == ("0",) and memory.frozen() == ()
    assert not frozen.project({"0.weight": torch.randn(6, 2, 3, 3)})["0.weight"].any()
    assert torch.equal(frozen.bases["3"], memory.bases["3"])
    with pytest.raises(UserError, match="'conv': choose among 0, 3"):
        memory.freeze("conv")


def test_covered_is_the_share_protected_before() -> None:
    model = nn.Linear(4, 2).double()
    memory = SubspaceMemory.empty(find_layers(model).layers, torch.float64)
    first = torch.eye(4).double()[:1]
    memory, growth = memory.expand(extract(memory, model, first), threshold=0.9)
    assert growth[""].covered == 0 and growth[""].rank == 1
    second = torch.tensor([[3.0, 1.0, 0, 0]]).double()
    sums = extract(memory, model, second)
    after, growth = memory.expand(sums, threshold=0.89)
    assert growth[""].covered == pytest.approx(90) and growth[""].added == 0
    after, growth = memory.expand(sums, threshold=0.91)
    assert growth[""].added == 1
    torch.testing.assert_close(after.bases[""][0].abs(), torch.eye(4).double()[:, :2])


def test_the_authors_rule_weighs_clients_by_samples_and_does_not_square() -> None:
    """w = (3 · 1 + 1 · 0.6) / 4 = 0.9: with one direction of S² share 0.5, .1 + .9 · .5 = .55."""
    model = nn.Linear(4, 2).double()
    layers = find_layers(model).layers
    basis = torch.eye(4).double()[:, :1].unsqueeze(0)
    memory = SubspaceMemory(layers, {"": basis})
    far = torch.tensor([[0.0, 2, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]]).double()
    near = torch.tensor([[4.0, 0, 0, 3]]).double()
    parts = [extract(memory, model, x, exact=True) for x in (far, near)]
    assert [part["/ratio"].item() for part in parts] == pytest.approx([3, 0.6])
    sums = {name: parts[0][name] + parts[1][name] for name in parts[0]}  # S² is 9, 4, 4
    shares = [9 / 17, 13 / 17]
    for r, share in enumerate(shares, start=1):
        edge = 0.1 + 0.9 * share
        assert memory.expand(sums, threshold=edge - 1e-9, rule="authors")[1][""].added == r
        assert memory.expand(sums, threshold=edge + 1e-9, rule="authors")[1][""].added == r + 1
    assert memory.expand(sums, threshold=0.0, rule="authors")[1][""].added == 1
    energy_edge = (16 + 9) / 33  # e = 8 + 25, of which the basis holds 16
    assert memory.expand(sums, threshold=energy_edge + 1e-9)[1][""].added == 2
    assert memory.expand(sums, threshold=energy_edge - 1e-9)[1][""].added == 1
    first = SubspaceMemory.empty(layers, torch.float64)  # w = 1 for the first task, whatever the sums say
    assert first.expand(sums, threshold=9 / 17 - 1e-9, rule="authors")[1][""].added == 1
    assert first.expand(sums, threshold=9 / 17 + 1e-9, rule="authors")[1][""].added == 2


def test_repeated_constant_inputs_take_one_direction_even_at_threshold_one() -> None:
    model = nn.Linear(40, 2)
    memory = SubspaceMemory.empty(find_layers(model).layers)
    constant = torch.randn(40)
    for task in range(5):
        sums = extract(memory, model, constant.repeat(300, 1) * (task + 1), key=task)
        memory, growth = memory.expand(sums, threshold=1.0, rule=("energy", "authors")[task % 2])
        assert growth[""].rank == 1


@pytest.mark.parametrize("rule", ["energy", "authors"])
@pytest.mark.parametrize("batches", [[], [torch.zeros(3, 8)]])
def test_no_samples_or_zeros_add_nothing(rule: str, batches: list[Tensor]) -> None:
    model = nn.Linear(8, 2)
    memory = SubspaceMemory.empty(find_layers(model).layers)
    for _ in range(2):
        sums = sketch(model, batches, memory.layers, memory.bases, size="d", key=0)
        after, growth = memory.expand(sums, threshold=0.9, rule=rule)
        assert growth[""].added == 0 and growth[""].covered == 0
        assert torch.equal(after.bases[""], memory.bases[""])
        memory, _ = memory.expand(extract(memory, model, torch.randn(2, 8)), threshold=0.9)


def test_exact_sums_with_and_without_a_draw() -> None:
    model, layers = nn.Linear(30, 2), find_layers(nn.Linear(30, 2)).layers
    memory = SubspaceMemory.empty(layers)
    sums = extract(memory, model, torch.randn(500, 30) * torch.linspace(1, 0.1, 30), exact=True)
    one, two, other = (memory.expand(sums, threshold=0.8, key=k, size="d")[0].bases[""] for k in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    plain, _ = memory.expand(sums, threshold=0.8)
    exact = torch.linalg.eigh(sums["/gram"][0].double()).eigenvectors.flip(-1)[:, : plain.bases[""].shape[-1]]
    O = plain.bases[""][0].double()
    assert torch.linalg.svdvals(O.mT @ exact).min() > 1 - 1e-6
    with pytest.raises(UserError, match="give expand a key"):
        memory.expand(sums, threshold=0.8, size="d")


def test_the_same_sums_give_the_same_bytes() -> None:
    (_, one), (_, two) = grown(), grown()
    assert all(torch.equal(one.bases[name], two.bases[name]) for name in one.bases)


def broken(sums: Tree, name: str, value: Tensor | None) -> Tree:
    return {k: v for k, v in sums.items() if k != name} | ({} if value is None else {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("3/sketch", None, "lack '3/sketch'"),
        ("samples", None, "lack 'samples'"),
        ("3/sketch", torch.zeros(1, 23, 24), "shape"),
        ("0/energy", torch.zeros(1), "shape"),
        ("3/sketch", torch.full((1, 24, 24), float("nan")), "NaN"),
        ("3/residual", torch.tensor([float("inf")]), "NaN or infinite"),
    ],
)
def test_sums_that_are_missing_misshapen_or_not_finite_are_refused(
    name: str, value: Tensor | None, message: str
) -> None:
    model, memory = grown()
    sums = extract(memory, model, torch.randn(6, 4, 4, 4))
    with pytest.raises(UserError, match=message):
        memory.expand(broken(sums, name, value), threshold=0.9)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UserError, match="'gpm' is no rank rule"):
        grown()[1].expand({}, threshold=0.9, rule="gpm")


def test_the_memory_of_a_half_precision_model_is_float32() -> None:
    layers: tuple[Layer, ...] = find_layers(nn.Linear(3, 2).bfloat16()).layers
    assert SubspaceMemory.empty(layers, torch.bfloat16).bases[""].dtype == torch.float32


def test_thresholds_rise_task_by_task() -> None:
    assert [threshold_at(t, 0.5, 0.125) for t in range(3)] == [0.5, 0.625, 0.75]
    assert [threshold_at(t, 0.5, 0.4) for t in (1, 2, 3)] == [0.9, 1.0, 1.0]  # never beyond all the energy


@pytest.mark.parametrize("threshold", [-0.1, 1.01, 95, float("nan"), float("inf")])
def test_a_threshold_that_is_no_share_is_refused(threshold: float) -> None:
    model, memory = grown()
    with pytest.raises(UserError, match=r"threshold of .* from 0 to 1"):
        memory.expand(extract(memory, model, torch.randn(6, 4, 4, 4)), threshold=threshold)


def test_a_protected_bias_without_its_weight_is_refused() -> None:
    update = {"3.bias": torch.ones(5)}
    with pytest.raises(UserError, match=r"'3\.bias' without '3\.weight'"):
        grown(bias=True)[1].project(update)
    assert grown()[1].project(update) == update
    with pytest.raises(UserError, match=r"no '3\.bias'"):
        grown(bias=True)[1].project({"3.weight": torch.ones(5, 24)})


@pytest.mark.parametrize(
    "shape", [(1, 23, 2), (2, 24, 2), (24, 2), (1, 24, 25)], ids=["d", "groups", "axes", "columns"]
)
def test_a_basis_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model, memory = grown()
    bases = {**memory.bases, "3": torch.zeros(shape)}
    with pytest.raises(UserError, match=r"basis of layer '3' has shape .*not \(1, 24, at most 24\)"):
        SubspaceMemory(memory.layers, bases)
    with pytest.raises(UserError, match="basis of layer '3' has shape"):
        sketch(model, [torch.randn(6, 4, 4, 4)], memory.layers, bases, size="d", key=0)


def test_a_memory_that_lacks_a_basis_is_refused() -> None:
    _, memory = grown()
    with pytest.raises(UserError, match="lacks a basis of '3'"):
        SubspaceMemory(memory.layers, {"0": memory.bases["0"]})


@pytest.mark.parametrize("exact", [False, True])
def test_a_sketch_that_shows_too_little_says_so(exact: bool) -> None:
    """s = 3 of 12: all three directions go in, and the threshold would have needed eleven."""
    model = nn.Linear(12, 2)
    memory = SubspaceMemory.empty(find_layers(model).layers)
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    for size, threshold, short in (("0.25d", 0.95, True), ("0.25d", 0.1, False), ("d", 1.0, False)):
        sums = extract(memory, model, x, size=size, exact=exact)
        _, growth = memory.expand(sums, threshold=threshold, key=1, size=size)
        assert growth[""].exhausted is short
        assert (growth[""].added == 3) == short
    low = x * (torch.arange(12) < 2)  # two directions are all there is
    growth = memory.expand(extract(memory, model, low, size="0.25d", exact=exact), threshold=1, key=1, size=3)
    assert growth[1][""].added == 2 and not growth[1][""].exhausted
    memory, _ = memory.expand(extract(memory, model, x[:10]), threshold=1.0)  # two are left for a sketch of 3
    growth = memory.expand(extract(memory, model, x, size="0.25d", exact=exact), threshold=1, key=1, size=3)
    assert growth[1][""].frozen and not growth[1][""].exhausted
