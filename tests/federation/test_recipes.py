"""The recipes of the paper's benchmarks, against the paper's table of set-ups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from torch import nn

from fot.benchmarks.catalogue import BENCHMARKS
from fot.errors import UserError
from fot.federation.experiment import Experiment, recipes, resolve
from fot.layers import find_layers
from fot.subspace import sample_size, threshold_at


@dataclass(frozen=True)
class SetUp:
    """One column of the table."""

    recipe: str
    tasks: int
    classes: int  # of a task
    clients: int
    cohort: int
    rounds: int | tuple[int, ...]
    batch: int
    thresholds: tuple[float, float]  # of the first task, IID and by shards
    increment: float
    sketch: dict[str, tuple[int, int]]  # part of a layer's name -> the sum of these layers' d, and s / d
    parameters: int  # with the heads of all tasks
    heterogeneous: int  # all clients where each sees 60 % of the tasks


# The dimensions d of a ResNet18's convolutions by its filters f, summed: 9 f or f times the stage's width.
_RESNET = {f: 27 + 9 * f * (5 + 2 * 4 + 4 * 4 + 8 * 3) + f * (1 + 2 + 4) for f in (20, 32)}
TABLE = [
    SetUp(
        recipe="pmnist",
        tasks=10,
        classes=10,
        clients=125,
        cohort=64,
        rounds=200,
        batch=64,
        thresholds=(0.94, 0.96),
        increment=0.0,
        sketch={"": (784 + 3 * 400, 1)},
        parameters=638_810,
        heterogeneous=208,
    ),
    SetUp(
        recipe="cifar100",
        tasks=10,
        classes=10,
        clients=50,
        cohort=25,
        rounds=1000,
        batch=16,
        thresholds=(0.87, 0.87),
        increment=0.001,
        sketch={"conv": (48 + 576 + 512, 1), "fc": (1024 + 2048, 5)},
        parameters=6_499_328 + 10 * 20_480,
        heterogeneous=83,
    ),
    SetUp(
        recipe="five-datasets",
        tasks=5,
        classes=10,
        clients=150,
        cohort=64,
        rounds=(1000, 100, 200, 100, 100),
        batch=16,
        thresholds=(0.95, 0.95),
        increment=0.001,
        sketch={"": (_RESNET[20], 5)},
        parameters=1_090_140 + 5 * 6_400,
        heterogeneous=250,
    ),
    SetUp(
        recipe="miniimagenet",
        tasks=20,
        classes=5,
        clients=50,
        cohort=25,
        rounds=250,
        batch=16,
        thresholds=(0.90, 0.90),
        increment=0.001,
        sketch={"": (_RESNET[32], 5)},
        parameters=2_795_040 + 20 * 11_520,
        heterogeneous=83,
    ),
]
PAPER = pytest.mark.parametrize("paper", TABLE, ids=lambda paper: paper.recipe)


@PAPER
@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_the_authors_profile_has_the_thresholds_and_workers_of_their_commands(paper, partition):
    method = resolve(paper.recipe, method="fot-authors", partition=partition).method
    pmnist = paper.recipe == "pmnist"  # whose thresholds the commands have the other way round
    assert method["threshold"] == paper.thresholds[(partition == "shards") != pmnist]
    assert method["increment"] == paper.increment
    assert method["sketch"] == resolve(paper.recipe).method["sketch"]
    assert method["shared_sketch_seed"] == (5 if pmnist else 8)
    assert (method["rule"], method["participants"], method["model"]) == ("authors", "cohort", "local")


@PAPER
@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_the_recipe_is_the_papers_set_up(paper, partition):
    recipe = resolve(paper.recipe, partition=partition)
    benchmark, method, training = recipe.benchmark, recipe.method, recipe.training
    assert benchmark["name"] == paper.recipe and benchmark["partition"] == partition
    assert (benchmark["tasks"], benchmark["clients"]) == (paper.tasks, paper.clients)
    assert benchmark.get("classes_per_task", 10) == paper.classes
    assert not benchmark.get("random_classes") and benchmark.get("augment", paper.classes == 5) == (
        paper.classes == 5
    )
    assert (benchmark["task_share"], benchmark["imbalance"]) == (1.0, 0.0)
    assert (training.rounds, training.cohort, training.epochs) == (paper.rounds, paper.cohort, 1)
    assert (training.batch_size, training.lr, training.weight_decay) == (paper.batch, 0.01, 1e-5)
    assert method["name"] == "fot" and method["increment"] == paper.increment
    assert method["threshold"] == paper.thresholds[partition == "shards"]
    assert threshold_at(1, method["threshold"], method["increment"]) == pytest.approx(
        paper.thresholds[partition == "shards"] + paper.increment
    )
    assert (method["rule"], method["mu"], method["protect"], method["bias"]) == ("energy", 1.0, None, False)
    assert (method["participants"], method["model"]) == ("all", "global")
    assert (method["shared_sketch_seed"], method["exact"]) == (0, False)
    assert recipe.aggregation["kind"] == "plain" and recipe.dp is None


@PAPER
def test_the_network_and_its_sketches_are_the_papers(paper):
    recipe = resolve(paper.recipe)
    model = recipe.make_model()
    layers = find_layers(model).layers
    for part, (dimensions, factor) in paper.sketch.items():
        some = [layer for layer in layers if part in layer.name]
        assert sum(layer.dimension for layer in some) == dimensions
        assert all(sample_size(layer, recipe.method["sketch"]) == factor * layer.dimension for layer in some)
    assert sum(layer.dimension for layer in layers) == sum(d for d, _ in paper.sketch.values())
    if paper.recipe != "pmnist":
        for _ in range(paper.tasks):
            model.add_task(paper.classes)
    assert sum(p.numel() for p in model.parameters()) == paper.parameters
    dropout = {"pmnist": [0.2, 0.5, 0.5], "cifar100": [0.2, 0.2, 0.5, 0.5, 0.5]}.get(paper.recipe, [])
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == dropout


@pytest.mark.parametrize("name, megabytes", [("cifar100", 107), ("five-datasets", 180)])
def test_sketches_are_larger_than_the_model_as_is_said(name, megabytes):
    recipe = resolve(name)
    sizes = [
        (of.dimension, sample_size(of, recipe.method["sketch"]))
        for of in find_layers(recipe.make_model()).layers
    ]
    assert round(sum(d * s for d, s in sizes) * 4 / 1e6) == megabytes


@PAPER
def test_task_heterogeneity_is_the_papers(paper):
    recipe = resolve(paper.recipe, sets=["benchmark.task_share=0.6"]).benchmark
    assert int(recipe["clients"] / recipe["task_share"]) == paper.heterogeneous


def unnamed(experiment: Experiment) -> Experiment:
    return replace(experiment, benchmark=experiment.benchmark | {"name": ""})


@pytest.mark.parametrize("end", ["", "-quick"])
def test_the_stand_in_differs_by_its_data_alone(end):
    mine, others = resolve(f"miniimagenet-standin{end}"), resolve(f"miniimagenet{end}")
    assert mine.benchmark["name"] == "miniimagenet-standin" and others.benchmark["name"] == "miniimagenet"
    assert unnamed(mine) == unnamed(others)


QUICK = sorted(name for name in recipes() if name.endswith("-quick"))


def test_every_benchmark_of_the_paper_has_a_quick_form():
    parents = {paper.recipe for paper in TABLE} | {"miniimagenet-standin"}
    assert {name.removesuffix("-quick") for name in QUICK} == parents


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_a_quick_form_has_its_parents_stream(name, partition):
    quick, parent = (resolve(of, partition=partition).benchmark for of in (name, name.removesuffix("-quick")))
    differs = {option for option in parent if quick[option] != parent[option]}
    if name == "five-datasets-quick":
        assert differs == {"clients"} and quick["clients"] == 2 * parent["clients"] == 300
    else:
        assert differs <= {"tasks"} and 5 <= quick["tasks"] <= parent["tasks"]


def test_recipes_name_benchmarks_of_the_catalogue():
    for name in recipes():
        assert resolve(name).benchmark["name"] in BENCHMARKS, name


def test_paths_of_a_sequence_come_from_a_recipe(tmp_path):
    """A list of TOML reaches the benchmark, and a path that does not exist is named before anything runs."""
    text = (
        '[benchmark]\nname = "own-sequence"\npaths = ["nowhere.csv"]\n'
        '[model]\nname = "mlp"\ninputs = 4\n[method]\nname = "fedavg"\n'
    )
    (tmp_path / "mine.toml").write_text(text)
    experiment = resolve(tmp_path / "mine.toml")
    with pytest.raises(UserError, match=r"benchmark\.paths: nowhere\.csv does not exist"):
        experiment.make_stream()
    for mistake in ("tasks=0", "clients=0"):
        option = mistake.split("=")[0]
        with pytest.raises(UserError, match=rf"^benchmark\.{option}: 0 is out of range"):
            resolve("digits", sets=[f"benchmark.{mistake}"])
