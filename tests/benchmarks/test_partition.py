from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.benchmarks.partition import Partition, _cut, _log_gamma, _pairs, stratified
from fot.errors import UserError
from fot.randomness import key, permutation


def all_dealt(held: tuple[torch.Tensor, ...]) -> list[int]:
    return torch.cat(held).tolist()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["iid", "shards", "dirichlet"]),
    samples=st.integers(60, 300),
    classes=st.integers(1, 12),
    clients=st.integers(1, 25),
    task_share=st.sampled_from([0.3, 0.6, 1.0]),
    imbalance=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 2**40),
)
def test_no_sample_is_dealt_twice(kind, samples, classes, clients, task_share, imbalance, seed):
    labels = permutation(seed, samples) % classes
    imbalance = 0.0 if kind == "dirichlet" else imbalance
    deal = Partition(kind, clients, task_share=task_share, imbalance=imbalance, seed=seed)
    held = deal(labels, task=3)
    dealt = all_dealt(held)
    assert len(held) == int(clients / task_share)
    assert len(set(dealt)) == len(dealt) and set(dealt) <= set(range(samples))
    assert sum(len(part) > 0 for part in held) <= clients
    if kind == "dirichlet" or imbalance:
        assert len(dealt) == samples
    else:
        assert (
            sorted(len(part) for part in held)[-clients:]
            == [samples // clients if kind == "iid" else 2 * (samples // (2 * clients))] * clients
        )


@pytest.mark.parametrize("samples, clients, each", [(60000, 125, 480), (5000, 50, 100), (2500, 50, 50)])
def test_sizes_of_the_paper(samples, clients, each):
    labels = torch.arange(samples) % 10
    for kind in ("iid", "shards"):
        assert {len(part) for part in Partition(kind, clients)(labels, 0)} == {each}


def test_sizes_of_five_datasets():
    deal = Partition("iid", 150)
    sizes = [len(deal(torch.arange(n) % 10, t)[0]) for t, n in enumerate([50000, 60000, 73257, 60000, 16851])]
    assert sizes == [333, 400, 488, 400, 112]


def test_two_equal_shards_leave_more_over_than_one_part():
    """CIFAR-10 over 150 clients: 333 samples each, but 300 shards of 166."""
    labels = torch.arange(50000) % 10
    assert {len(part) for part in Partition("shards", 150)(labels, 0)} == {332}


def can_be_paired(classes: tuple[frozenset[int], ...]) -> bool:
    """Whether some pairing gives no pair a third class, by trying them all."""
    if not classes:
        return True
    first, rest = classes[0], classes[1:]
    return any(
        len(first | other) <= 2 and can_be_paired(rest[:k] + rest[k + 1 :]) for k, other in enumerate(rest)
    )


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=7),
    clients=st.integers(1, 5),
    imbalance=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 2**30),
)
def test_no_third_class_wherever_the_shards_allow_it(sizes, clients, imbalance, seed):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    if len(labels) < 2 * clients:
        return
    deal = Partition("shards", clients, imbalance=imbalance, seed=seed)
    of = key(seed, "partition", 0)
    shards = _cut(deal._dealt(labels, 2), deal._weights(of, 2 * clients))  # labels are sorted as they are
    possible = can_be_paired(tuple(frozenset(shard.tolist()) for shard in shards))
    assert possible == all(labels[held].unique().numel() <= 2 for held in deal(labels, 0))


@pytest.mark.parametrize(
    "classes, third",
    [
        ([{0, 1}, {1, 2}, {1}, {2}], 0),  # the first may take the only shard of the second's
        ([{0, 1}, {1, 2}, {2, 3}, {1}, {2}, set()], 0),
        ([{0, 1}, {2, 3}, {0}, set()], 0),  # an empty shard serves all: it is kept for who needs it
        ([{0}, {0, 1, 2}, {2}, {2}], 1),
        ([{0, 1}, {2, 3}, {4}, {5}], 2),
        ([{0, 1}, {4}, {0}, {5}], 0),
    ],
)
def test_pairs_by_label_serve_as_many_as_can_be(classes, third):
    for seed in range(20):
        pairs = _pairs(classes, permutation(seed, len(classes)).tolist(), by_label=True)
        assert sorted(j for pair in pairs for j in pair) == list(range(len(classes)))
        assert sum(len(classes[i] | classes[j]) > 2 for i, j in pairs) == third


def test_shards_of_one_class_are_paired_at_random():
    for by_label in (False, True):
        pairs = _pairs([{c} for c in range(10)] * 20, permutation(0, 200).tolist(), by_label)
        assert 2 <= sum(i % 10 == j % 10 for i, j in pairs) <= 20  # 10 are expected


@pytest.mark.parametrize("clients, samples", [(125, 60000), (20, 1438), (150, 50000), (150, 16853)])
@pytest.mark.parametrize("imbalance", [0.0, 0.5])
def test_shards_give_a_client_at_most_two_classes_though_classes_are_unequal(clients, samples, imbalance):
    sizes = torch.tensor([0.098, 0.112, 0.099, 0.102, 0.097, 0.090, 0.099, 0.104, 0.098, 0.101])
    labels = torch.arange(10).repeat_interleave((sizes * samples).long())
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    for seed in range(3):
        held = Partition("shards", clients, seed=seed, imbalance=imbalance)(labels, 0)
        assert all(labels[mine].unique().numel() <= 2 for mine in held)
        dealt = torch.cat(held)
        assert len(dealt) == len(dealt.unique()) > len(labels) - 2 * clients
        if not imbalance:
            assert {len(mine) for mine in held} == {2 * (len(labels) // (2 * clients))}
        assert sum(labels[mine].unique().numel() == 2 for mine in held) > clients / 2  # still at random


def test_shards_give_a_client_at_most_two_classes_where_they_divide():
    labels = torch.arange(5000) % 10  # shards of 50, classes of 500
    for seed in range(3):
        held = Partition("shards", 50, seed=seed)(labels, 0)
        assert all(labels[part].unique().numel() <= 2 for part in held)
        assert any(labels[part].unique().numel() == 2 for part in held)


def test_iid_clients_hold_every_class():
    labels = torch.arange(5000) % 10
    assert all(labels[part].unique().numel() == 10 for part in Partition("iid", 50)(labels, 0))


def test_the_deal_is_pinned():
    """Written down once: another platform or version that deals otherwise fails here."""
    labels = torch.arange(12) % 3
    pinned = {
        "iid": [[0, 1, 2, 4], [5, 6, 9, 11], [3, 7, 8, 10]],
        "shards": [[3, 6, 8, 11], [0, 2, 5, 9], [1, 4, 7, 10]],
        "dirichlet": [[1, 4], [2, 5, 7, 10], [0, 3, 6, 8, 9, 11]],
    }
    for kind, expected in pinned.items():
        assert [part.tolist() for part in Partition(kind, 3, seed=5)(labels, 1)] == expected, kind


def test_tasks_and_seeds_are_dealt_anew():
    labels = torch.arange(100) % 10
    for kind in ("iid", "shards", "dirichlet"):
        first = Partition(kind, 5, seed=1)
        assert all_dealt(first(labels, 0)) == all_dealt(first(labels, 0))
        assert all_dealt(first(labels, 0)) != all_dealt(first(labels, 1))
        assert all_dealt(first(labels, 0)) != all_dealt(Partition(kind, 5, seed=2)(labels, 0))


def test_task_heterogeneity_chooses_other_clients_for_other_tasks():
    deal = Partition("iid", 50, task_share=0.6)
    labels = torch.arange(5000) % 10
    seen = [tuple(len(part) > 0 for part in deal(labels, task)) for task in range(40)]
    assert deal.num_clients == 83 and all(sum(s) == 50 for s in seen)
    share = torch.tensor(seen).double().mean(0)  # of the tasks, for each client
    assert abs(share.mean() - 50 / 83) < 1e-9 and share.min() > 0.3 and share.max() < 0.9


@pytest.mark.parametrize("clients, all_clients", [(125, 208), (50, 83), (150, 250)])
def test_clients_of_the_papers_heterogeneity(clients, all_clients):
    assert Partition("iid", clients, task_share=0.6).num_clients == all_clients


def test_dirichlet_is_uneven_at_a_small_alpha_and_even_at_a_large_one():
    labels = torch.arange(20000) % 10

    def largest_class(alpha):
        held = Partition("dirichlet", 20, alpha=alpha)(labels, 0)
        shares = [labels[part].bincount(minlength=10) / max(len(part), 1) for part in held]
        return torch.stack(shares).max(1).values.mean().item()

    assert largest_class(0.02) > 0.7 > 0.35 > largest_class(1.0) > 0.15 > largest_class(1000.0)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_gamma_draws_have_mean_and_variance_alpha(alpha):
    draws = _log_gamma(11, 40000, alpha).exp()
    assert abs(draws.mean().item() / alpha - 1) < 0.05
    assert abs(draws.var().item() / alpha - 1) < 0.1


def test_gamma_draws_do_not_vanish_at_a_tiny_alpha():
    assert Partition("dirichlet", 4, alpha=1e-4)(torch.zeros(10, dtype=torch.int64), 0)
    assert _log_gamma(3, 100, 1e-4).isfinite().all()


def test_imbalance_spreads_the_sizes():
    labels = torch.arange(20000) % 10
    for kind in ("iid", "shards"):
        sizes = torch.tensor([len(p) for p in Partition(kind, 100, imbalance=1.0)(labels, 0)]).double()
        spread = sizes.clamp_min(1).log().std().item()
        assert sizes.sum() == 20000 and 0.7 < spread < 1.3


def test_natural_partition_follows_the_owners():
    owners = torch.tensor([2, 0, 1, 0, 5])
    held = Partition("natural", 3)(torch.zeros(5, dtype=torch.int64), 0, owners)
    assert [part.tolist() for part in held] == [[1, 3], [2], [0, 4]]


def test_stratified_takes_the_share_of_every_class():
    labels = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)
    train, test = stratified(labels, 0.1, of=3)
    assert labels[test].bincount().tolist() == [5, 2, 1]
    assert sorted(train.tolist() + test.tolist()) == list(range(80))
    train, test = stratified(labels * 1000 - 500, 0.1, of=3)  # any numbers will do for names
    assert labels[test].bincount().tolist() == [5, 2, 1] and len(train) == 72
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match="between 0 and 1"):
            stratified(labels, share, of=3)


@pytest.mark.parametrize(
    "mistake",
    [
        {"kind": "striped"},
        {"clients": 0},
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"task_share": 0.0},
        {"task_share": 1.5},
        {"imbalance": -1.0},
        {"kind": "dirichlet", "imbalance": 1.0},
        {"kind": "natural", "task_share": 0.5},
    ],
)
def test_mistakes_are_named(mistake):
    with pytest.raises(UserError):
        Partition(**mistake)


def test_too_few_samples_and_no_owners_are_named():
    with pytest.raises(UserError, match="too few"):
        Partition("iid", 5)(torch.zeros(4, dtype=torch.int64), 0)
    with pytest.raises(UserError, match="too few"):
        Partition("shards", 5)(torch.zeros(9, dtype=torch.int64), 0)
    with pytest.raises(UserError, match="owner"):
        Partition("natural", 5)(torch.zeros(9, dtype=torch.int64), 0)
