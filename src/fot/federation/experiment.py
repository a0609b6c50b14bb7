"""What a run is: every setting in one frozen object, read from TOML and written back as TOML.

A recipe has the tables ``[benchmark]``, ``[model]``, ``[method]``, ``[training]``, ``[engine]``,
``[aggregation]`` and ``[evaluation]``, and ``seed``. Two more tables say what differs:
``[methods.NAME]`` holds options of one method, so that a recipe serves several, and
``[when.PARTITION]`` is merged over the rest under that partition.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from fot.aggregation import Aggregation, Privacy, make_aggregation
from fot.benchmarks.catalogue import BENCHMARKS, Benchmark, Option, build
from fot.benchmarks.partition import KINDS
from fot.benchmarks.stream import Stream
from fot.engines.base import EngineOptions, Training
from fot.errors import UserError
from fot.federation.checkpoint import CheckpointOptions
from fot.methods import METHODS, Method
from fot.models import MODELS
from fot.options import Between, check_table, checked, convert, defaults
from fot.randomness import key

RECIPES = Path(__file__).parent.parent / "recipes"
Table = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """When the global model is tested: at the end of every task in any case."""

    every: Annotated[int, Between(0)] = 0
    """Also after every so many rounds; 0 for not."""


@dataclass(frozen=True)
class Experiment:
    """A run's settings, complete and checked: what ``experiment.toml`` in a run folder says.

    Examples
    --------
    >>> experiment = resolve("digits", method="fedavg", sets=["training.lr=0.05"])
    >>> experiment.method, experiment.training.lr
    ({'name': 'fedavg'}, 0.05)
    >>> Experiment.from_table(tomllib.loads(experiment.to_toml())) == experiment
    True
    """

    benchmark: Table
    model: Table
    method: Table
    aggregation: Table
    training: Training = field(default_factory=Training)
    engine: EngineOptions = field(default_factory=EngineOptions)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    dp: Privacy | None = None
    """Differential privacy of the sums; none without a table ``[dp]``."""
    seed: int = 0

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Experiment:
        """Check every key of a table without ``methods`` and ``when``, and fill in the defaults."""
        tables = (
            "benchmark",
            "model",
            "method",
            "aggregation",
            "training",
            "engine",
            "evaluation",
            "checkpoint",
            "dp",
        )
        for name in table:
            if name != "seed" and name not in tables:
                close = difflib.get_close_matches(name, [*tables, "seed"], n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UserError(f"{name}: no such table{hint} (allowed: {', '.join([*tables, 'seed'])})")
            if name != "seed" and not isinstance(table[name], Mapping):
                raise UserError(f"{name}: {table[name]!r} is not a table; write [{name}] and its keys below")
        part = {name: dict(table.get(name, {})) for name in tables}
        return cls(
            benchmark=benchmark_table(part["benchmark"]),
            model=_named("model", part["model"], model_builder),
            method=_named("method", part["method"], method_class),
            aggregation=_filled(make_aggregation, {"kind": "plain"} | part["aggregation"], "aggregation"),
            training=Training(**checked(Training, part["training"], "training")),
            engine=EngineOptions(**checked(EngineOptions, part["engine"], "engine")),
            evaluation=Evaluation(**checked(Evaluation, part["evaluation"], "evaluation")),
            checkpoint=CheckpointOptions(**checked(CheckpointOptions, part["checkpoint"], "checkpoint")),
            dp=Privacy(**checked(Privacy, part["dp"], "dp")) if "dp" in table else None,
            seed=convert(table.get("seed", 0), Annotated[int, Between(0)], "seed"),
        )

    def to_table(self) -> Table:
        """The settings as nested tables; an option that is None is left out."""
        table: Table = _without_none(asdict(self))
        return table

    def to_toml(self) -> str:
        """The settings as TOML: a recipe that repeats this run."""
        return "".join(_toml_lines(self.to_table()))

    def digest(self) -> str:
        """Names the settings but for the seed: runs of equal digests differ in their draws alone."""
        return hashlib.sha256(replace(self, seed=0).to_toml().encode()).hexdigest()

    def make_stream(self) -> Stream:
        """The benchmark's stream of tasks."""
        options = _options(self.benchmark)
        if ":" in self.benchmark["name"]:
            builder = lookup(self.benchmark["name"], BENCHMARKS, "benchmark")
            seeded = "seed" in inspect.signature(builder).parameters
            stream: Stream = builder(**options, **({"seed": self.seed} if seeded else {}))
            return stream
        return build(self.benchmark["name"], seed=self.seed, **options)

    def make_model(self) -> torch.nn.Module:
        """The model, with initial weights that depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "model"))
            model = model_builder(self.model["name"])(**_options(self.model))
        if not isinstance(model, torch.nn.Module):
            raise UserError(
                f"model.name: {self.model['name']} made a {type(model).__name__}, not a torch.nn.Module"
            )
        return model

    def make_method(self) -> Method:
        """The method, with its options."""
        return method_class(self.method["name"])(**_options(self.method))

    def make_aggregation(self) -> Aggregation:
        """How sums are formed."""
        return make_aggregation(**self.aggregation, seed=self.seed, privacy=self.dp)


def recipes() -> dict[str, Path]:
    """The recipes that come with the package."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.toml"))}


def resolve(
    recipe: str | Path,
    *,
    method: str | None = None,
    partition: str | None = None,
    seed: int | None = None,
    engine: str | None = None,
    device: str | None = None,
    sets: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> Experiment:
    """The experiment of a recipe (a name, or the path of a TOML file) under some changes.

    ``sets`` are texts ``key=value``, the key dotted (``training.lr=0.1``), the value as in TOML; ``values``
    are the same, read already. What comes later wins: the recipe, ``[when.PARTITION]``, ``[methods.NAME]``,
    ``sets``, ``values``, the other arguments.
    """
    table = _read(recipe)
    changes: Table = {}
    flags = {"method.name": method, "benchmark.partition": partition, "seed": seed}
    flags |= {"engine.kind": engine, "engine.device": device}
    given = [*map(_assignment, sets), *(values or {}).items()]
    for name, value in [*given, *((k, v) for k, v in flags.items() if v is not None)]:
        _merge(changes, _nested(name.split("."), value))
    when = _tables(table, "when")
    kind = _look(changes, "benchmark", "partition") or _look(table, "benchmark", "partition") or "iid"
    per_method = _tables(table, "methods")
    _merge(table, copy.deepcopy(when.get(str(kind), {})))
    for more in (_tables(table, "methods"), _tables(changes, "methods")):
        _merge(per_method, more)
    chosen = _look(changes, "method", "name") or _look(table, "method", "name")
    if chosen != _look(table, "method", "name"):
        table["method"] = {}  # the options written there are another method's
    _check_variants(per_method, when)
    if str(chosen) in per_method:
        _merge(table, {"method": per_method[str(chosen)]})
    _merge(table, changes)
    return Experiment.from_table(table)


def swept(sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of the values of some settings, each given as ``key=value,value,...``.

    Examples
    --------
    >>> swept(["method.threshold=0.9,0.95", "method.rule=energy,authors"])[1]
    {'method.threshold': 0.9, 'method.rule': 'authors'}
    >>> swept([])
    [{}]
    """
    combinations: list[dict[str, Any]] = [{}]
    for text in sweeps:
        name, _, listed = text.partition("=")
        try:
            values = tomllib.loads(f"values = [{listed}]")["values"]
        except tomllib.TOMLDecodeError:
            values = [_assignment(f"{name}={value}")[1] for value in listed.split(",")]
        if not name.strip() or not values:
            raise UserError(f"--sweep {text}: write it as key=value,value, e.g. method.threshold=0.9,0.95")
        combinations = [{**some, name.strip(): value} for some in combinations for value in values]
    return combinations


def _check_variants(per_method: Mapping[str, Table], when: Mapping[str, Table]) -> None:
    """Check what this run does not use too: a misspelt name there would be passed over in silence."""
    for name, options in per_method.items():
        if ":" in name:
            continue  # a user's own, imported only where it is chosen
        if name not in METHODS:
            raise UserError(f"methods.{name}: no method is called so ({', '.join(METHODS)})")
        checked(METHODS[name], options, f"methods.{name}")
    settings = {"training": Training, "engine": EngineOptions, "evaluation": Evaluation}
    for partition, tables in when.items():
        if partition not in KINDS:
            raise UserError(f"when.{partition}: no partition is called so ({', '.join(KINDS)})")
        for name, options in tables.items():
            if name not in ("benchmark", "model", "method", "methods", "aggregation", *settings):
                raise UserError(f"when.{partition}.{name}: no such table")
            if name in settings:
                checked(settings[name], options, f"when.{partition}.{name}")
        _check_variants(tables.get("methods", {}), {})


def method_class(name: str) -> type[Method]:
    """A method by its name, or a user's own as ``package.module:Class``."""
    found = lookup(name, METHODS, "method")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"method.name: {name} is not a subclass of fot.methods.Method")
    return found


def model_builder(name: str) -> Callable[..., torch.nn.Module]:
    """A model by its name, or a user's own as ``package.module:Class``."""
    found: Callable[..., torch.nn.Module] = lookup(name, MODELS, "model")
    return found


def benchmark_table(table: Table) -> Table:
    """The checked options of a benchmark: of a catalogued one, or of a user's ``package.module:function``.

    A user's function takes ``seed``, if it likes, and options of its own, and returns a stream of tasks.
    """
    found = lookup(_name("benchmark", table), BENCHMARKS, "benchmark")
    if not isinstance(found, Benchmark):
        return _named("benchmark", table, lambda name: found)
    options = {"partition": Option(str, "iid"), "data_dir": Option(str, None), **found.options}
    given = check_table(_options(table), {n: o.type for n, o in options.items()}, "benchmark")
    return {"name": table["name"], **{n: o.default for n, o in options.items()}, **given}


def lookup(name: str, catalogue: Mapping[str, Any], what: str) -> Any:
    """An entry of a catalogue, or what ``package.module:attribute`` names."""
    if ":" not in name:
        if name in catalogue:
            return catalogue[name]
        close = difflib.get_close_matches(name, catalogue, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        listed = ", ".join(catalogue)
        raise UserError(f"{what}.name: no {what} is called {name!r}{hint} ({listed}, or package.module:Name)")
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the user's own file in the current folder
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the user's own file raises
        why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{what}.name: cannot import {module!r} ({why}); run from the folder that holds it"
        ) from error
    if not callable(found):
        raise UserError(f"{what}.name: {module!r} has no class or function {attribute!r}")
    return found


def _named(section: str, table: Table, find: Callable[[str], Callable[..., Any]]) -> Table:
    name = _name(section, table)
    return {"name": name, **_filled(find(name), _options(table), section)}


def _name(section: str, table: Table) -> str:
    name = table.get("name")
    if not isinstance(name, str):
        raise UserError(f"{section}.name: missing; `fot list` shows what there is")
    return name


def _filled(target: Callable[..., Any], table: Table, section: str) -> Table:
    given = ["seed", "privacy", "dropouts", "entropy"]  # what the code fills in, and a recipe may not
    return defaults(target, given=given) | checked(target, table, section, given=given)


def _options(table: Table) -> Table:
    return {name: value for name, value in table.items() if name != "name"}


def _read(recipe: str | Path) -> Table:
    path = recipes().get(str(recipe), Path(recipe))
    try:
        if path.is_dir():
            path = path / "experiment.toml"
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        close = difflib.get_close_matches(str(recipe), recipes(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        listed = ", ".join(recipes())
        raise UserError(f"no recipe or file {str(recipe)!r}{hint} (recipes: {listed})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a recipe or a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: write it as key=value, for example training.lr=0.1")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _tables(table: Table, name: str) -> dict[str, Table]:
    """Take the table of tables ``name`` out of ``table``."""
    found = table.pop(name, {})
    for entry, value in found.items() if isinstance(found, Mapping) else [("NAME", found)]:
        if not isinstance(value, Mapping):
            raise UserError(f"{name}: {value!r} is not a table; write [{name}.{entry}] and its keys below")
    return dict(found)


def _nested(path: Sequence[str], value: Any) -> Table:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def _merge(into: Table, table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _look(table: Mapping[str, Any], *path: str) -> Any:
    for name in path:
        if not isinstance(table, Mapping) or name not in table:
            return None
        table = table[name]
    return table


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return value


def _toml_lines(table: Table, path: tuple[str, ...] = ()) -> Iterator[str]:
    """TOML needs a table's own keys before its sub-tables."""
    for name, value in table.items():
        if not isinstance(value, dict):
            yield f"{_toml_key(name)} = {_toml_value(value)}\n"
    for name, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{'.'.join(map(_toml_key, (*path, name)))}]\n"
            yield from _toml_lines(value, (*path, name))


def _toml_key(name: str) -> str:
    bare = name.replace("_", "a").replace("-", "a").isalnum() and name.isascii()
    return name if bare else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)  # JSON has no inf
    # TOML takes no surrogates and no raw DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
