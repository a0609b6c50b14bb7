"""FedAvg and FOT as a server sees them: what moves, what is held, who takes part, what is sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fot.errors import NotFinite, UserError
from fot.methods import FOT, METHODS, Batch, ClientData, FedAvg, Method, Server
from fot.models import MultiHead
from fot.network import Network, Tree


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())
    net = Network(MultiHead(body, 4, bias=True), dtype=torch.float64)
    net.add_task(3, 0, 0)
    return net


def random_like(tree: Tree) -> Tree:
    return {name: torch.randn_like(tensor) for name, tensor in tree.items()}


def data(n: int = 12, rank: int = 2, client: int = 0, position: int = 0) -> ClientData:
    g = torch.Generator().manual_seed(17)
    x = torch.randn(n, rank, generator=g).double() @ torch.randn(rank, 6, generator=g).double()
    return ClientData(x, torch.zeros(n, dtype=torch.int64), 0, 99, client, position)


def learnt(method: FOT, net: Network, clients: list[ClientData] | None = None) -> tuple[Server, dict]:
    """The server after one extraction from a task."""
    server = Server(net.tree(), {})
    sums: Tree = {}
    for one in clients or [data()]:
        broadcast = method.broadcast(net, server)
        state, statistics = method.end_of_task(net, server.params, one, {}, broadcast)
        assert state == {}  # FOT's clients keep nothing
        sums = {name: sums.get(name, 0) + value for name, value in statistics.items()}
    return method.consolidate(net, server, sums, 0, 7)


def body(net: Network, params: Tree, x: Tensor, layer: int) -> Tensor:
    """The output of one linear layer of the body."""
    for i in range(0, layer + 1, 2):
        x = x @ params[f"body.{i}.weight"].T + params[f"body.{i}.bias"]
        if i < layer:
            x = x.relu()
    return x


def test_catalogue():
    assert METHODS["fedavg"] is FedAvg and METHODS["fot"] is FOT


def test_fedavg_adds_the_mean_update_and_extracts_nothing():
    net = network()
    server = Server(net.tree(), {})
    update = {"body.0.weight": torch.randn(5, 6).double()}
    moved = FedAvg().aggregate(net, server, update)
    assert torch.equal(
        moved.params["body.0.weight"], server.params["body.0.weight"] + update["body.0.weight"]
    )
    assert torch.equal(moved.params["body.0.bias"], server.params["body.0.bias"])
    assert torch.equal(server.params["body.0.weight"], net.tree()["body.0.weight"])  # a new server
    assert not FedAvg().extracts and FOT().extracts
    assert FedAvg().usage(net, server) == {} == FedAvg().dimensions(net) == FedAvg().broadcast(net, server)


def test_loss_is_cross_entropy_over_the_weighted_samples():
    net = network()
    x, y = torch.randn(4, 6).double(), torch.tensor([0, 2, 1, 1])
    weight = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]).double()
    loss = FedAvg().loss(net, net.tree(), Batch(x, y, 0, weight), {})
    expected = nn.functional.cross_entropy(net(net.tree(), x[:3], 0), y[:3])
    torch.testing.assert_close(loss, expected)


def test_before_the_first_task_fot_is_fedavg():
    net = network()
    server, update = Server(net.tree(), {}), random_like(net.tree())
    plain, fot = (m.aggregate(net, server, update).params for m in (FedAvg(), FOT()))
    assert all(torch.equal(plain[name], fot[name]) for name in plain)


def test_old_inputs_keep_their_outputs_and_new_ones_do_not():
    """The heart of it: W moves, and W x stays for the inputs of old tasks."""
    net = network()
    server, report = learnt(FOT(threshold=1.0), net)
    assert report["layers"]["body.0"]["rank"] == 2
    update = random_like(net.tree())
    after = FOT().aggregate(net, server, update).params
    x = data().x
    weight = after["body.0.weight"] - server.params["body.0.weight"]
    assert (x @ weight.T).abs().max() < 1e-9
    fresh = torch.randn(5, 6).double()
    assert (fresh @ weight.T).abs().max() > 0.1
    # What is not protected moves by the whole update: biases and heads.
    for free in ("body.0.bias", "body.2.bias", "heads.0.weight", "heads.0.bias"):
        assert torch.equal(after[free], server.params[free] + update[free])
    # And what moves is the update less its projection, not more: a multiple of it passes unchanged.
    O = server.state["body.0"][0]
    expected = update["body.0.weight"] @ (torch.eye(6).double() - O @ O.T)
    torch.testing.assert_close(weight, expected)


def test_the_step_mu():
    net = network()
    server, _ = learnt(FOT(threshold=0.9), net)
    update = random_like(net.tree())
    one, half = (FOT(mu=mu).aggregate(net, server, update).params for mu in (1.0, 0.5))
    for name in net.trained(0):
        start = server.params[name]
        torch.testing.assert_close(half[name] - start, 0.5 * (one[name] - start))
        assert (one[name] - start).abs().max() > 0.01


def test_the_step_mu_leaves_running_statistics_to_their_mean():
    net = Network(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    update = {name: torch.ones_like(net.tree()[name]) for name in [*net.trained(0), *net.carried()]}
    after = FOT(mu=0.5).aggregate(net, Server(net.tree(), {}), update).params
    moved = {name: float((after[name] - net.tree()[name]).mean()) for name in update}
    assert {name: pytest.approx(step) for name, step in moved.items()} == {
        name: 1.0 if "running" in name else 0.5 for name in update
    }


def test_protect_names_the_layers():
    net = network()
    server, report = learnt(FOT(protect=("body.2",)), net)
    assert list(report["layers"]) == list(server.state) == ["body.2"]
    assert FOT(protect=("body.2",)).dimensions(net) == {"body.2": 5}
    assert FOT().dimensions(net) == {"body.0": 6, "body.2": 5}
    with pytest.raises(UserError, match="nothing"):
        FOT(protect=("nothing",)).dimensions(net)


def test_options_are_checked_against_the_network_before_training():
    net = Network(MultiHead(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), 5))  # before its first task
    for protect in (None, ("body.*",), ("body.0", "heads.*")):
        FOT(protect=protect).check(net)
    assert not net.module.heads  # it is left as it was
    FOT(sketch={"body.*": "2d"}).check(net)
    FedAvg().check(net)
    with pytest.raises(UserError, match=r"^method\.protect: 'fc' names no layer.*choose among body\.0"):
        FOT(protect=("fc",)).check(net)
    for wrong in ("x", "0d", {"conv*": "d"}, {"*": "0.01d"}):
        with pytest.raises(UserError, match=r"^method\.sketch: .*sketch size"):
            FOT(sketch=wrong).check(net)


def test_a_protected_bias_holds_the_whole_output():
    """With biases protected, W x + b itself stays for old inputs."""
    net = network()
    method = FOT(threshold=1.0, bias=True)
    server, _ = learnt(method, net)
    assert method.dimensions(net)["body.0"] == 7
    after = method.aggregate(net, server, random_like(net.tree())).params
    x = data().x
    torch.testing.assert_close(body(net, after, x, 0), body(net, server.params, x, 0), rtol=0, atol=1e-9)
    assert (after["body.0.weight"] - server.params["body.0.weight"]).abs().max() > 1e-3


def test_the_frozen_first_layer():
    net = network()
    method = FOT(threshold=0.9, freeze_first=True)
    server = Server(net.tree(), {})
    assert "body.0" not in method.broadcast(net, server)
    _, statistics = method.end_of_task(net, server.params, data(), {}, method.broadcast(net, server))
    assert not [name for name in statistics if name.startswith("body.0")]
    assert "body.2/sketch" in statistics
    update = random_like(net.tree())
    free = method.aggregate(net, server, update).params
    assert torch.equal(free["body.0.weight"], server.params["body.0.weight"] + update["body.0.weight"])
    server, report = method.consolidate(net, server, statistics, 0, 7)
    after = method.aggregate(net, server, update).params
    for name in ("body.0.weight", "body.0.bias"):
        assert torch.equal(after[name], server.params[name])
    assert not torch.equal(after["body.2.bias"], server.params["body.2.bias"])
    assert method.usage(net, server)["body.0"] == 100 and report["warnings"] == []  # it was asked for
    assert "body.0" not in method.broadcast(net, server)


def test_a_frozen_first_layer_that_is_the_whole_model():
    net = Network(nn.Linear(6, 3), dtype=torch.float64)
    method = FOT(freeze_first=True)
    server, _ = learnt(method, net)
    after = method.aggregate(net, server, random_like(net.tree())).params
    assert all(torch.equal(after[name], tensor) for name, tensor in server.params.items())


def test_who_shares_a_sketch():
    """By default all draw their own; with n workers, positions 0 to n - 1 share, then n to 2n - 1."""
    net = network()

    def sketch(method: FOT, client: int, position: int) -> Tensor:
        one = data(client=client, position=position)
        return method.end_of_task(net, net.tree(), one, {}, {})[1]["body.0/sketch"]

    own, shared = FOT(), FOT(shared_sketch_seed=2)
    assert not torch.equal(sketch(own, 0, 0), sketch(own, 1, 1))
    assert torch.equal(sketch(own, 3, 0), sketch(own, 3, 5))  # wherever a client stands
    assert torch.equal(sketch(shared, 4, 0), sketch(shared, 8, 1))
    assert torch.equal(sketch(shared, 4, 2), sketch(shared, 8, 3))
    assert not torch.equal(sketch(shared, 4, 1), sketch(shared, 4, 2))


def test_exact_sums_give_the_same_subspaces():
    """Low rank and th = 1: both find the very span of the inputs. Else: near it, the larger s the nearer."""
    net = network()
    clients = [data(client=0), data(client=1)]
    methods = FOT(threshold=1.0), FOT(threshold=1.0, exact=True)
    a, b = (learnt(method, net, clients)[0].state["body.0"][0] for method in methods)
    torch.testing.assert_close(a @ a.T, b @ b.T, rtol=0, atol=1e-6)
    torch.manual_seed(1)
    wide = ClientData(
        torch.randn(60, 6).double() * 2.0 ** torch.arange(6), torch.zeros(60).long(), 0, 5, 0, 0
    )
    u, s, _ = torch.linalg.svd(wide.x.T, full_matrices=False)
    share = (s**2).cumsum(0) / (s**2).sum()
    th = float(share[1] + share[2]) / 2  # far from both steps: three directions
    for exact in (False, True):
        gaps = []
        for size in ("100d", "5000d"):
            O = learnt(FOT(threshold=th, exact=exact, sketch=size), net, [wide])[0].state["body.0"][0]
            assert O.shape[1] == 3
            gaps.append(float((O @ O.T - u[:, :3] @ u[:, :3].T).norm()))
        assert gaps[1] < 0.03 and gaps[1] < gaps[0]
    sums = FOT(exact=True).end_of_task(net, net.tree(), wide, {}, {})[1]
    torch.testing.assert_close(sums["body.0/gram"][0], wide.x.T @ wide.x)


def test_thresholds_rise_by_the_increment():
    net = network()
    method = FOT(threshold=0.5, increment=0.02)
    statistics = method.end_of_task(net, net.tree(), data(), {}, {})[1]
    told = [method.consolidate(net, Server(net.tree(), {}), statistics, t, 0)[1]["threshold"] for t in (0, 3)]
    assert told == [0.5, pytest.approx(0.56)]


def test_a_full_layer_warns_once_is_frozen_and_is_sketched_no_more():
    net = network()
    method = FOT(threshold=1.0)
    server, report = learnt(method, net, [data(n=40, rank=6)])
    assert report["layers"]["body.0"]["rank"] == 6
    assert [w for w in report["warnings"] if "body.0" in w] == [
        "layer body.0 is full after task 1: it is frozen from here on"
    ]
    after = method.aggregate(net, server, random_like(net.tree())).params
    assert torch.equal(after["body.0.weight"], server.params["body.0.weight"])
    assert method.usage(net, server)["body.0"] == 100
    broadcast = method.broadcast(net, server)
    _, statistics = method.end_of_task(net, server.params, data(), {}, broadcast)
    assert "body.0/sketch" not in statistics
    again, report = method.consolidate(net, server, statistics, 1, 0)
    assert not [w for w in report["warnings"] if "body.0" in w]
    assert torch.equal(again.state["body.0"], server.state["body.0"])


def test_the_sketch_size_by_layer():
    net = network()
    method = FOT(sketch={"body.0": "2d", "*": 3})
    statistics = method.end_of_task(net, net.tree(), data(), {}, {})[1]
    assert statistics["body.0/sketch"].shape == (1, 6, 12) and statistics["body.2/sketch"].shape == (1, 5, 3)


def test_a_sketch_that_is_too_small_is_a_warning():
    net = network()
    _, report = learnt(FOT(threshold=0.99, sketch={"body.0": 2, "*": "d"}), net, [data(n=40, rank=6)])
    assert report["layers"]["body.0"]["added"] == 2
    assert [w for w in report["warnings"] if "sketch" in w] == [
        "layer body.0: task 1 took all that its sketch can show, and the threshold may need more; "
        "raise method.sketch"
    ]


def test_damaged_data_are_named_as_such():
    one = data()
    one.x[3, 2] = torch.nan
    with pytest.raises(NotFinite, match="NaN"):
        FOT().end_of_task(network(), network().tree(), one, {}, {})


def test_memory_is_saved(tmp_path):
    from fot.subspace import SubspaceMemory

    net, method = network(), FOT()
    server, _ = learnt(method, net)
    method.save_memory(net, server, tmp_path / "memory.safetensors")
    read = SubspaceMemory.load(tmp_path / "memory.safetensors", method._layers(net))
    assert all(torch.equal(read.bases[name], basis) for name, basis in server.state.items())
    FedAvg().save_memory(net, Server(net.tree(), {}), tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()
    Method().save_memory(net, Server({}, {"kept": torch.ones(2)}), tmp_path / "own.safetensors")
    assert (tmp_path / "own.safetensors").exists()


def test_batches_hold_every_sample_once():
    one = data(n=11)
    pieces = list(one.batches(4))
    assert [len(x) for x, _ in pieces] == [4, 4, 3]
    assert torch.equal(torch.cat([x for x, _ in pieces]), one.x)


def test_what_is_left_free_is_told_with_the_reason():
    network = Network(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)))
    assert set(FOT().unprotected(network)) == {"0.bias", "1"}
    assert set(FOT(bias=True).unprotected(network)) == {"1"}
    assert FedAvg().unprotected(network) == {}
