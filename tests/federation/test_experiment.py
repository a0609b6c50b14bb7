"""Settings: what wins, what is refused and how, and that an experiment survives its own file."""

from __future__ import annotations

import tomllib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.errors import UserError
from fot.federation.experiment import Experiment, lookup, recipes, resolve
from fot.methods import METHODS
from fot.models import MODELS

RECIPE = """
seed = 3
[benchmark]
name = "digits"
partition = "iid"
[model]
name = "mlp"
[method]
name = "fot"
threshold = 0.1
increment = 0.01
[training]
lr = 0.1
rounds = 7
[methods.fot]
threshold = 0.2
[when.shards.training]
lr = 0.3
batch_size = 4
[when.shards.method]
increment = 0.03
[when.shards.methods.fot]
mu = 0.5
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(RECIPE)
    return path


def refusal(*sets: str, recipe: object = "digits", **options) -> str:
    with pytest.raises(UserError) as caught:
        resolve(recipe, sets=sets, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_comes_later_wins(recipe):
    """The recipe, [when.PARTITION], [methods.NAME], --set, flags."""
    plain = resolve(recipe)
    assert plain.method["threshold"] == 0.2 and plain.method["increment"] == 0.01
    assert (plain.training.lr, plain.training.batch_size, plain.training.rounds) == (0.1, 32, 7)
    assert plain.seed == 3 and plain.method["mu"] == 1.0
    shards = resolve(recipe, partition="shards")
    assert shards.benchmark["partition"] == "shards"
    assert (shards.training.lr, shards.training.batch_size, shards.training.rounds) == (0.3, 4, 7)
    assert (shards.method["increment"], shards.method["mu"], shards.method["threshold"]) == (0.03, 0.5, 0.2)
    assert resolve(recipe, sets=["benchmark.partition=shards"]) == shards
    changed = resolve(recipe, partition="shards", sets=["training.lr=0.7", "method.threshold=0.9"])
    assert changed.training.lr == 0.7 and changed.method["threshold"] == 0.9
    assert resolve(recipe, sets=["methods.fot.threshold=0.8"]).method["threshold"] == 0.8
    both = resolve(recipe, sets=["methods.fot.threshold=0.8", "method.threshold=0.9"])
    assert both.method["threshold"] == 0.9
    assert resolve(recipe, sets=["seed=5"], seed=6).seed == 6
    assert resolve(recipe, sets=["method.name=fot"], method="fedavg").method == {"name": "fedavg"}
    assert resolve(recipe, engine="sequential").engine.kind == "sequential"
    assert resolve(recipe, device="cpu").engine.device == "cpu"


def test_a_change_to_another_method_leaves_the_options_behind(recipe):
    assert resolve(recipe, method="fedavg").method == {"name": "fedavg"}
    back = resolve(recipe, method="fedavg", sets=["methods.fot.threshold=0.8"])
    assert back.method == {"name": "fedavg"}


def test_a_set_wins_over_a_resolved_file(recipe, tmp_path):
    """A finished run's experiment.toml spells out every option; --set still changes them."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "experiment.toml").write_text(resolve(recipe).to_toml())
    assert resolve(folder) == resolve(recipe)
    for text in ("methods.fot.threshold=0.5", "method.threshold=0.5"):
        assert resolve(folder, sets=[text]).method["threshold"] == 0.5


def test_values_are_read_as_toml_and_else_as_text():
    experiment = resolve(
        "digits",
        sets=[
            "training.rounds=[3, 4]",
            "engine.precision=float64",
            "method.exact=true",
            'method.sketch="5d"',
        ],
    )
    assert experiment.training.rounds == (3, 4) and experiment.engine.precision == "float64"
    assert experiment.method["exact"] is True and experiment.method["sketch"] == "5d"
    assert resolve("digits", sets=["method.sketch=2d"]).method["sketch"] == "2d"
    spaced = resolve("digits", sets=[" training.lr = 0.5 "])
    assert spaced.training.lr == 0.5


def test_resolving_twice_is_the_same():
    """Recipes are not changed by being resolved."""
    assert resolve("digits", partition="shards") == resolve("digits", partition="shards")
    assert resolve("digits").benchmark["partition"] == "iid"


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_every_recipe_serves_every_method(name, method, partition):
    experiment = resolve(name, method=method, partition=partition)
    assert experiment.method["name"] == method and experiment.benchmark["partition"] == partition
    assert Experiment.from_table(tomllib.loads(experiment.to_toml())) == experiment
    assert type(experiment.make_method()) is METHODS[method]
    experiment.make_aggregation()


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_says_what_it_is(name):
    assert recipes()[name].read_text(encoding="utf-8").startswith("# ")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
options = st.fixed_dictionaries(
    {},
    optional={
        "threshold": st.floats(0, 1),
        "mu": st.floats(0, allow_nan=False, allow_infinity=False),
        "sketch": st.integers(1, 2**62)
        | texts
        | st.dictionaries(texts, st.integers(1, 9) | texts, max_size=2),
        "protect": st.lists(texts, max_size=3),
        "exact": st.booleans(),
        "shared_sketch_seed": st.integers(0, 99),
    },
)


@settings(max_examples=80)
@given(
    options, st.integers(0, 2**63 - 1), st.floats(0, allow_nan=False, allow_infinity=False), texts,
    st.integers(1, 50) | st.lists(st.integers(1, 50), min_size=1, max_size=3),
)  # fmt: skip
def test_an_experiment_survives_its_own_file(method, seed, lr, folder, rounds):
    experiment = Experiment.from_table(
        {
            "seed": seed,
            "benchmark": {"name": "digits", "data_dir": folder},
            "model": {"name": "mlp", "hidden": [5]},
            "method": {"name": "fot", **method},
            "training": {"lr": lr, "rounds": rounds},
        }
    )
    text = experiment.to_toml()
    again = Experiment.from_table(tomllib.loads(text))
    assert again == experiment and again.to_toml() == text


def test_privacy_is_a_table_of_its_own():
    assert resolve("digits").dp is None and "[dp]" not in resolve("digits").to_toml()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainig.lr=1", "trainig: no such table; did you mean training?"),
        ("x=1", "x: no such table (allowed: benchmark, model, method"),
        ("training=1", "training: 1 is not a table; write [training] and its keys below"),
        ("method=fot", "method: 'fot' is not a table"),
        ("methods=1", "methods: 1 is not a table; write [methods.NAME]"),
        ("methods.fot=1", "methods: 1 is not a table; write [methods.fot]"),
        ("training.lrr=1", "training.lrr: no such option; did you mean lr?"),
        ("training.lr=fast", "training.lr: 'fast' is not allowed; allowed: a number at least 0"),
        ("training.lr=-1", "training.lr: -1 is out of range; allowed: a number at least 0"),
        ("training.cohort=0", "training.cohort: 0 is out of range; allowed: a whole number at least 1"),
        ("training.rounds=[]", "training.rounds: the list is empty"),
        ("training.rounds=[2, 0]", "training.rounds[1]: 0 is out of range"),
        ("training.min_clients=11", "training.min_clients: 11 is more than the cohort of 10"),
        ("method.threshold=1.5", "method.threshold: 1.5 is out of range; allowed: a number from 0 to 1"),
        ("method.threshold=-0.1", "method.threshold: -0.1 is out of range"),
        ("method.increment=1.01", "method.increment: 1.01 is out of range; allowed: a number from 0 to 1"),
        ("method.sketch=0", "method.sketch: 0 is out of range"),
        ("method.mu=-0.1", "method.mu: -0.1 is out of range; allowed: a number at least 0"),
        ("method.shared_sketch_seed=-1", "method.shared_sketch_seed: -1 is out of range"),
        ("method.rule=best", "method.rule: 'best' is not allowed; allowed: energy, authors"),
        ("method.name=[1]", "method.name: missing"),
        ("method.name=fott", "method.name: no method is called 'fott'; did you mean fot?"),
        ("model.name=mpl", "model.name: no model is called 'mpl'; did you mean mlp?"),
        ("model.widht=3", "model.widht: no such option"),
        ("benchmark.name=digit", "benchmark.name: no benchmark is called 'digit'; did you mean digits?"),
        ("benchmark.partition=[1]", "benchmark.partition: [1] is not allowed; allowed: a text"),
        ("benchmark.seed=1", "benchmark.seed: no such option"),
        ("engine.kind=fast", "engine.kind: 'fast' is not allowed; allowed: vectorized, sequential"),
        ("evaluation.every=-1", "evaluation.every: -1 is out of range"),
        ("aggregation.entropy=1", "aggregation.entropy: no such option"),
        ("seed=-1", "seed: -1 is out of range; allowed: a whole number at least 0"),
        ("seed=1.5", "seed: 1.5 is not allowed"),
        ("nonsense", "--set nonsense: write it as key=value"),
        ("=3", "--set =3: write it as key=value"),
        ("model.name=:x", "model.name: cannot import ''"),
        ("model.name=.a:x", "model.name: cannot import '.a'"),
        ("model.name=os:sep", "model.name: 'os' has no class or function 'sep'"),
        ("model.name=os:nothing", "model.name: 'os' has no class or function 'nothing'"),
        ("method.name=no_such_file:X", "method.name: cannot import 'no_such_file'"),
        (
            "method.name=torch.nn:Linear",
            "method.name: torch.nn:Linear is not a subclass of fot.methods.Method",
        ),
    ],
)
def test_refusals(text, said):
    assert refusal(text).startswith(said)


def test_recipes_that_cannot_be_read(tmp_path):
    assert refusal(recipe="digist").startswith("no recipe or file 'digist'; did you mean digits?")
    assert "(recipes: cifar100" in refusal(recipe="zzz")
    assert "cannot be read" in refusal(recipe="x" * 999)
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 3")
    assert "not valid TOML" in refusal(recipe=broken)
    broken.write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refusal(recipe=broken)
    broken.write_text("when = 3")
    assert refusal(recipe=broken).startswith("when: 3 is not a table")
    broken.write_text("[when]\niid = 3")
    assert refusal(recipe=broken).startswith("when: 3 is not a table; write [when.iid]")
    broken.write_text("seed = 1")
    assert refusal(recipe=broken).startswith("benchmark.name: missing; `fot list` shows what there is")


OWN = """
import torch
from fot.benchmarks.stream import Task, TaskStream
from fot.methods import FedAvg

class Mine(FedAvg):
    \"\"\"A method of one's own.\"\"\"

def net(width: int = 4, bad: bool = False):
    layers = torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    return 5 if bad else torch.nn.Sequential(*layers)

def stream(tasks: int = 2, *, seed: int):
    return _stream(tasks, seed)

def unseeded(tasks: int = 2):
    return _stream(tasks, 9)

def _stream(tasks, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(12, 3, generator=g), torch.randint(2, (12,), generator=g)
    def make(index):
        return Task(index, f"own {index}", 2, x, y, x, y, (torch.arange(6), torch.arange(6, 12)))
    return TaskStream("own", 2, False, (3,), tasks, make)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_parts_of_a_user.py").write_text(OWN)
    (tmp_path / "own_broken_file.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    path = tmp_path / "own.toml"
    path.write_text(
        '[benchmark]\nname = "own_parts_of_a_user:stream"\ntasks = 3\n'
        '[model]\nname = "own_parts_of_a_user:net"\nwidth = 6\n'
        '[method]\nname = "own_parts_of_a_user:Mine"\n'
    )
    return path


def test_ones_own_parts(own):
    experiment = resolve(own, seed=4)
    assert experiment.make_model()[0].out_features == 6
    assert type(experiment.make_method()).__name__ == "Mine"
    stream = experiment.make_stream()
    assert len(stream) == 3
    assert not torch.equal(stream[0].train_x, resolve(own, seed=5).make_stream()[0].train_x)
    unseeded = resolve(own, sets=["benchmark.name=own_parts_of_a_user:unseeded"])
    assert len(unseeded.make_stream()) == 3
    assert refusal("model.widht=1", recipe=own).startswith("model.widht: no such option; did you mean width?")
    assert "SyntaxError" in refusal("method.name=own_broken_file:X", recipe=own)
    with pytest.raises(UserError, match="made a int, not a torch"):
        resolve(own, sets=["model.bad=true"]).make_model()


def test_initial_weights_depend_on_the_seed_alone():
    def first(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed() % 1000)
        state = torch.random.get_rng_state()
        model = resolve("digits", seed=seed).make_model()
        assert torch.equal(torch.random.get_rng_state(), state)
        return next(model.parameters())

    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))


def test_lookup_lists_what_there_is():
    with pytest.raises(UserError, match=", ".join(list(MODELS)[:2])):
        lookup("nothing at all", MODELS, "model")


@pytest.mark.parametrize(
    "text, said",
    [
        ("[methods.fto]\nthreshold = 0.1", "methods.fto: no method"),
        ("[methods.fedavg]\nbogus = 1", "methods.fedavg.bogus: no such option"),
        ("[when.shardz.training]\nlr = 0.1", "when.shardz: no partition"),
        ("[when.shards.trainin]\nlr = 0.1", "when.shards.trainin: no such table"),
        ("[when.shards.training]\nlrr = 0.1", "when.shards.training.lrr: no such option"),
        ("[when.shards.methods.fto]\nmu = 1.0", "methods.fto: no method"),
    ],
)
def test_what_a_run_does_not_use_is_checked_too(tmp_path, text, said):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'[benchmark]\nname = "digits"\n[model]\nname = "mlp"\n[method]\nname = "fot"\n{text}\n'
    )
    with pytest.raises(UserError, match=said):
        resolve(recipe)
