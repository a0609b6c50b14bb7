"""A module as a function of its tree: the user's module stays as it was, heads grow, statistics travel."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Training
from fot.federation.run import Run
from fot.methods import FedAvg
from fot.models import MultiHead
from fot.network import Network, save_tree


def two_heads() -> Network:
    network = Network(MultiHead(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), 3, bias=True))
    network.add_task(2, seed=0, task=0)
    network.add_task(5, seed=0, task=1)
    return network


def test_heads_grow():
    network = two_heads()
    x = torch.randn(6, 4)
    assert network(network.tree(), x, 0).shape == (6, 2)
    assert network(network.tree(), x, 1).shape == (6, 5)
    added = network.add_task(7, seed=0, task=2)
    assert set(added) == {"heads.2.weight", "heads.2.bias"}
    assert network(network.tree(), x, 2).shape == (6, 7)


def test_a_new_head_depends_on_seed_and_task_alone():
    def head(seed: int, task: int, noise: int) -> torch.Tensor:
        network = Network(MultiHead(nn.Flatten(), 3))
        torch.manual_seed(noise)
        state = torch.random.get_rng_state()
        made = network.add_task(2, seed, task)["heads.0.weight"]
        assert torch.equal(torch.random.get_rng_state(), state)  # the user's own generator is left alone
        return made

    assert torch.equal(head(0, 0, 1), head(0, 0, 2))
    assert not torch.equal(head(0, 0, 1), head(1, 0, 1))
    assert not torch.equal(head(0, 0, 1), head(0, 1, 1))


def test_heads_take_the_networks_precision():
    network = Network(MultiHead(nn.Linear(4, 3), 3), dtype=torch.float64)
    assert network.add_task(2, 0, 0)["heads.0.weight"].dtype is torch.float64
    assert network(network.tree(), torch.ones(1, 4, dtype=torch.float64), 0).dtype is torch.float64


def test_one_head_has_no_tasks_to_add():
    network = Network(nn.Linear(4, 3))
    assert not network.multi_head and network.add_task(5, 0, 0) == {}
    assert network(network.tree(), torch.ones(2, 4), 8).shape == (2, 3)


def test_clients_train_all_but_other_heads_and_frozen_parts():
    network = two_heads()
    body = ("body.0.weight", "body.0.bias")
    assert network.trained(0) == (*body, "heads.0.weight", "heads.0.bias")
    assert network.trained(1) == (*body, "heads.1.weight", "heads.1.bias")
    for task in range(2, 12):
        network.add_task(2, 0, task)
    assert network.trained(1)[2:] == ("heads.1.weight", "heads.1.bias")  # not those of heads 10 and 11
    network.module.body[0].bias.requires_grad_(False)
    assert "body.0.bias" not in Network(network.module).trained(0)


def test_what_is_known_of_the_module_is_found_anew_with_each_head():
    network, walks = two_heads(), []

    def find(module):
        walks.append(len(module.heads))
        return len(module.heads)

    assert [network.known("heads", find) for _ in range(3)] == [2, 2, 2] and walks == [2]
    network.add_task(2, 0, 2)
    assert network.known("heads", find) == 3


class ViT(nn.Module):
    """One output for all tasks, called ``heads``, as torchvision calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(4, 3))

    def forward(self, x):
        return self.heads(self.body(x).relu())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_an_output_called_heads_is_trained(engine):
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.tensor([0, 1, 2, 0] * 2)
    stream = TaskStream(
        "own", 1, False, (6,), 2, lambda i: Task(i, f"{i}", 3, x, y, x, y, (torch.arange(8),))
    )
    model = ViT()
    training = Training(rounds=1, cohort=1, batch_size=8, lr=0.1)
    run = Run(stream, model, FedAvg(), training=training, engine=EngineOptions(kind=engine, device="cpu"))
    assert not run.network.multi_head and run.network.trained(1) == tuple(
        n for n, _ in model.named_parameters()
    )
    run()
    for name, start in model.named_parameters():
        assert (run.state.server.params[name] - start).abs().max() > 1e-4, name


def test_trees_are_copies():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(module.state_dict())
    network = Network(module)
    tree = network.tree()
    assert set(tree) == set(before)
    for tensor in tree.values():
        tensor.zero_()
    network(tree, torch.randn(4, 2), 0, training=True)
    for name, tensor in network.tree().items():
        assert torch.equal(tensor, before[name]) and not tensor.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_the_tree_is_what_is_called():
    network = Network(nn.Linear(2, 1))
    tree = {"weight": torch.tensor([[2.0, -1.0]]), "bias": torch.tensor([0.5])}
    assert network(tree, torch.tensor([[3.0, 1.0]]), 0).tolist() == [[5.5]]


def test_training_mode_is_the_callers_choice():
    network = Network(nn.Dropout(1.0))
    x = torch.ones(2, 2)
    assert network({}, x, 0, training=True).tolist() == [[0, 0], [0, 0]]
    assert network({}, x, 0).tolist() == [[1, 1], [1, 1]]


def test_bfloat16_products_leave_everything_else_in_float32():
    torch.manual_seed(0)
    module = nn.Linear(64, 3)
    x = torch.randn(5, 64)
    exact, rough = Network(module), Network(module, autocast=True)
    tree = rough.tree()
    assert all(t.dtype is torch.float32 for t in tree.values())
    logits = rough(tree, x, 0)
    assert logits.dtype is torch.float32
    gap = (logits - exact(tree, x, 0)).abs().max()
    assert 1e-5 < gap < 0.1  # rounded, and near


class Masked(nn.Module):
    """A model with a constant that is not finite, as attention masks are, and one whole-number buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x):
        return self.norm(self.linear(x)) + self.mask.clamp_min(-1e-3)


def test_running_statistics_are_carried_and_constants_are_not():
    assert Network(Masked()).carried() == ("norm.running_mean", "norm.running_var")


@pytest.mark.filterwarnings("ignore:clients train one after another")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_tracked_batch_norm_is_averaged(engine):
    """The server's running statistics move to the mean of the clients'; the count of batches stays."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(8, 2) + 5, torch.randn(8, 2) - 3])
    y = torch.tensor([0, 1] * 8)
    task = Task(0, "t", 2, x, y, x, y, (torch.arange(8), torch.arange(8, 16)))
    stream = TaskStream("own", 2, False, (2,), 1, lambda _: task)
    model = Masked()
    training = Training(rounds=1, cohort=2, batch_size=8, lr=0.1)
    run = Run(stream, model, FedAvg(), training=training, engine=EngineOptions(kind=engine, device="cpu"))
    summary = run()
    after = run.state.server.params
    features = model.linear(x).detach()
    means = torch.stack([features[:8].mean(0), features[8:].mean(0)])
    variances = torch.stack([features[:8].var(0), features[8:].var(0)])
    torch.testing.assert_close(after["norm.running_mean"], 0.1 * means.mean(0))
    torch.testing.assert_close(after["norm.running_var"], 0.9 + 0.1 * variances.mean(0))
    assert after["norm.num_batches_tracked"] == 0
    assert torch.equal(after["mask"], model.mask)
    assert summary["excluded"] == 0
    assert (after["linear.weight"] - model.linear.weight).abs().max() > 1e-4
    sent = 4 * (4 + 2 + 2 + 2 + 2 + 2)  # weight, bias, scale, shift, mean, variance
    assert summary["bytes_down"]["training"] == sent and summary["bytes_up"]["training"] == sent + 4


def test_a_tree_is_saved_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    save_tree({"a": torch.ones(2, 3).T, "b": torch.tensor(5)}, path)
    read = safetensors.torch.load_file(path)
    assert torch.equal(read["a"], torch.ones(3, 2)) and read["b"] == 5
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
