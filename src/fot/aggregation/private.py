"""Differential privacy of sums, at the level of a client.

Two runs are neighbours if they differ in what one client sends, its arrays in one and zeros in the other.
Each client scales its arrays to a joint norm of at most L and adds a share of the noise, so that the sum,
which is all the server sees, carries N(0, (z L)²) in every entry: one release is a Gaussian mechanism of
noise multiplier z. The epsilon of the run composes all of its releases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from fot import randomness
from fot.aggregation.accountant import Accountant, check_installed, gaussian_noise
from fot.aggregation.codec import Codec, Coding
from fot.aggregation.interface import Aggregation, Kind, Summation, Sums, check_rows
from fot.errors import UserError

_COARSEST = 4.0  # the least deviation of a client's noise, in steps of the ring
_AT_ONCE = 4  # clients whose arrays are held in float64
_UNITS = {"metric/*": 100.0, "samples": 1000.0, "*/ratio": 1000.0}
_TAIL = 12.0  # deviations at which the discrete Gaussian is cut off: 1e-32 of its mass


@dataclass(frozen=True)
class Privacy:
    """What is asked for.

    Attributes
    ----------
    epsilon, delta : float
        The guarantee that `releases` sums keep together.
    clip : float
        L, the joint norm of a client's statistics over all layers.
    releases : int
        How many sums `epsilon` is meant for; 0 for all that the run will form and that are private.
    calibration : str
        "analytic" (Balle & Wang, 2018), or "paper": the printed formula, which clips each array on its own
        and whose noise is too small; the epsilon that it really gives is reported.
    noise : float, optional
        The noise multiplier z itself, instead of the one that `epsilon` asks for.
    statistics, updates : bool
        Which sums are private. The reported epsilon covers these alone.
    update_clip : float
        L of the training updates.
    amplify : bool
        Whether to report, as `epsilon_released`, what the sampling of cohorts adds against somebody who
        does not know them. It needs dp-accounting.
    scales : mapping, optional
        The public unit of an array by a pattern on its name, for arrays of unlike size: norms are measured,
        and noise is added, in that unit. It is 1 by default; 100 for metrics ("metric/...") and 1,000 for
        "samples" and "*/ratio", which grow with the number of samples and would take the room of the rest.
    """

    epsilon: float = 5.0
    delta: float = 1e-5
    clip: float = 1.0
    releases: int = 0
    calibration: Literal["analytic", "paper"] = "analytic"
    noise: float | None = None
    statistics: bool = True
    updates: bool = False
    update_clip: float = 1.0
    amplify: bool = False
    scales: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if not (0 < self.epsilon <= 1e9 and 0 < self.delta < 1 and self.releases >= 0):
            raise UserError(
                "dp: epsilon must be positive and at most 1e9 (dp.noise = 0.0 asks for none), "
                "delta between 0 and 1, releases at least 1, or 0 for all"
            )
        if self.noise is not None and not (self.noise == 0 or 1e-6 <= self.noise <= 1e6):
            raise UserError(f"dp.noise: {self.noise:g}; choose 0 or from 1e-6 to 1e6")
        for clip in (self.clip, self.update_clip):
            if not (1e-30 <= clip <= 1e30 or clip == math.inf):
                raise UserError(f"dp: a clip of {clip:g}; choose from 1e-30 to 1e30, or inf")
        for pattern, unit in (self.scales or {}).items():
            if not 1e-30 <= unit <= 1e30:
                raise UserError(f"dp.scales.{pattern}: a unit of {unit:g}; choose from 1e-30 to 1e30")
        if self.calibration not in ("analytic", "paper"):
            raise UserError(f"dp.calibration '{self.calibration}': choose analytic or paper")
        if self.multiplier > 0 and not math.isfinite(max(self.clip, self.update_clip)):
            raise UserError("dp: noise needs a finite clip; set dp.clip and dp.update_clip")

    @property
    def multiplier(self) -> float:
        """The noise multiplier z.

        Examples
        --------
        >>> round(Privacy(epsilon=1.0, noise=None).multiplier, 3)
        3.731
        >>> round(Privacy(epsilon=5.0, calibration="paper").multiplier, 3)
        0.685
        """
        if self.noise is not None:
            return self.noise
        if self.calibration == "paper":
            return math.sqrt(math.log(1.25 / self.delta)) / self.epsilon
        return gaussian_noise(self.epsilon, self.delta) * math.sqrt(max(self.releases, 1))

    def scale(self, name: str) -> float:
        """The unit of an array."""
        units = [*(self.scales or {}).items(), *_UNITS.items()]
        return next((unit for pattern, unit in units if fnmatchcase(name, pattern)), 1.0)


class PrivateAggregation(Aggregation):
    """Another aggregation, with clipped and noisy arrays.

    Examples
    --------
    >>> from fot.aggregation.plain import PlainAggregation
    >>> private = PrivateAggregation(PlainAggregation(), Privacy(epsilon=1.0), seed=0)
    >>> summation = private.open([0, 1], kind="statistics", path=(0, 0))
    >>> summation.add([0, 1], {"sketch": torch.ones(2, 3)})
    >>> _ = summation.close()
    >>> round(private.report()["epsilon"], 3)
    1.0
    """

    def __init__(
        self, inner: Aggregation, privacy: Privacy, *, seed: int, codec: Codec | None = None
    ) -> None:
        self.inner = inner
        self.privacy = privacy
        self.seed = seed
        self.codec = codec
        self.accountant = Accountant(privacy.delta)
        self.only_sums = inner.only_sums
        if privacy.amplify:
            check_installed()  # now, not when the run is over

    def plan(self, sums: Mapping[Kind, int] | None) -> None:
        """Share the epsilon over the sums to come, unless the user has said over how many."""
        self.inner.plan(sums)
        privacy = self.privacy
        if privacy.releases:
            return
        if sums is not None:
            private = (privacy.statistics * sums["statistics"], privacy.updates * sums["update"])
            self.privacy = replace(privacy, releases=sum(private))
        elif privacy.noise is None and privacy.calibration == "analytic":
            raise UserError("dp.releases: nobody knows how many tasks will come; say over how many sums")

    def notes(self) -> list[str]:
        """What the inner aggregation has to say."""
        return self.inner.notes()

    def expect(self, cohort: Sequence[int]) -> None:
        """Pass on who comes next."""
        self.inner.expect(cohort)

    def state(self) -> list[Any]:
        """What a checkpoint must keep of the accountant, as JSON can hold it."""
        return [[noise, sample] for noise, sample in self.accountant.releases]

    def restore(self, state: list[Any]) -> None:
        """Take up where `state` left off."""
        self.accountant.releases = [(noise, tuple(sample) if sample else None) for noise, sample in state]

    def open(
        self, cohort: Sequence[int], *, kind: Kind, path: tuple[int, ...], drawn_from: int | None = None
    ) -> Summation:
        """Begin a sum, private if sums of its kind are."""
        summation = self.inner.open(cohort, kind=kind, path=path)
        if not (self.privacy.updates if kind == "update" else self.privacy.statistics):
            return summation
        population = drawn_from or 0
        sample = (len(cohort), population) if self.privacy.amplify and population > len(cohort) else None
        return PrivateSummation(self, summation, len(cohort), kind, path, sample)

    def report(self) -> dict[str, Any]:
        """The run's privacy so far: for the summary and the report."""
        privacy = self.privacy
        return {
            "epsilon": self.accountant.epsilon(),
            "epsilon_released": self.accountant.epsilon(sampled=True),
            "delta": privacy.delta,
            "asked": privacy.epsilon,
            "calibration": privacy.calibration,
            "noise": privacy.multiplier,
            "releases": len(self.accountant.releases),
            "covers": [
                k for k, on in (("statistics", privacy.statistics), ("updates", privacy.updates)) if on
            ],
        }


class PrivateSummation:
    """One private sum: clients clip and add their share of the noise before the sum is formed.

    `sample` is (cohort, population) where the sum is accounted as one over a drawn cohort.
    """

    discreet = True
    add_total = None

    def __init__(
        self,
        parent: PrivateAggregation,
        inner: Summation,
        clients: int,
        kind: Kind,
        path: tuple[int, ...],
        sample: tuple[int, int] | None = None,
    ) -> None:
        self.parent, self.inner, self.clients, self.kind, self.sample = parent, inner, clients, kind, sample
        privacy = parent.privacy
        self.bound = privacy.update_clip if kind == "update" else privacy.clip
        # A share of 1/n of the variance each: if all stay, the sum has all of the noise that z asks for.
        self.deviation = privacy.multiplier * self.bound / math.sqrt(clients) if privacy.multiplier else 0.0
        self.key = randomness.key(parent.seed, f"privacy {kind}", *path)
        self.dtypes: dict[str, torch.dtype] = {}

    def add(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Clip, add noise, pass on: a few clients at a time, for in float64 they take twice the memory."""
        check_rows(clients, arrays)
        self.dtypes = {name: array.dtype for name, array in arrays.items()}
        arrays = _zeros_for_what_is_not_finite(arrays)
        for start in range(0, len(clients), _AT_ONCE):
            some = clients[start : start + _AT_ONCE]
            self.inner.add(
                some, self._noisy(some, {n: x[start : start + _AT_ONCE] for n, x in arrays.items()})
            )

    def _noisy(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        privacy, codec = self.parent.privacy, self.parent.codec
        units = {name: privacy.scale(name) for name in arrays}
        codings: dict[str, Coding] = {}
        if codec is not None and self.deviation:
            shapes = {name: tuple(array.shape[1:]) for name, array in arrays.items()}
            codings = codec.codings(self.kind, shapes, self.clients)
        noisy: dict[str, Tensor] = {}
        for group in [[name] for name in arrays] if privacy.calibration == "paper" else [list(arrays)]:
            # Rounding to the ring moves an entry by up to half a step: the norm is clipped that much lower.
            rounding = (
                arrays[n].shape[1:].numel() * (codings[n].step / units[n] / 2) ** 2 for n in group if codings
            )
            bound = self.bound - math.sqrt(sum(rounding))
            if bound <= 0:
                raise UserError("the ring is too coarse for dp.clip: raise the clip or the ring's bits")
            for name, array in clip_jointly({n: arrays[n] for n in group}, bound, units).items():
                coding, deviation = codings.get(name), self.deviation * units[name]
                if coding:
                    self._fits(name, coding, deviation, self.bound * units[name])
                place = sorted(arrays).index(name)
                for row, client in enumerate(clients) if deviation else ():
                    draw = randomness.fold(randomness.fold(self.key, client), place)
                    _add_noise(
                        array[row : row + 1], deviation, coding, randomness.generator(draw, array.device)
                    )
                keep = coding or not self.dtypes[name].is_floating_point
                noisy[name] = array if keep else array.to(self.dtypes[name])
        return noisy

    @staticmethod
    def _fits(name: str, coding: Coding, deviation: float, largest: float) -> None:
        if deviation < _COARSEST * coding.step:
            raise UserError(f"the ring is too coarse for the noise of '{name}': lower its clip or add bits")
        if largest + _TAIL * deviation > coding.limit * coding.step:  # what the codec clips is not Gaussian
            raise UserError(
                f"the noise of '{name}' exceeds its clip in the ring: raise the clip, or the bits too"
            )

    def close(self) -> Sums:
        """The noisy sum; the accountant is told how much noise it really has."""
        sums = self.inner.close()
        privacy = self.parent.privacy
        released = privacy.multiplier * math.sqrt(len(sums.clients) / self.clients)
        if privacy.calibration == "paper":
            released /= math.sqrt(len(sums.arrays))  # each array may move by L: together by L √arrays
        self.parent.accountant.add(released, self.sample)
        arrays = {
            name: (array if self.dtypes[name].is_floating_point else array.round()).to(self.dtypes[name])
            for name, array in sums.arrays.items()
        }
        return Sums(arrays, sums.clients, sums.bytes_up, sums.bytes_down, sums.clipped)


def _zeros_for_what_is_not_finite(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays, with zeros in all rows of a client that has anything in them that is not finite."""
    if bool(torch.stack([array.sum().isfinite() for array in arrays.values()]).all()):
        return arrays  # told in one pass; where a sum overflows, look closer
    rows = [array.reshape(len(array), -1).isfinite().all(1) for array in arrays.values()]
    finite = torch.stack(rows).all(0)
    zeroed = {name: array.clone() for name, array in arrays.items()}
    for array in zeroed.values():
        array[~finite] = 0
    return zeroed


def clip_jointly(
    arrays: Mapping[str, Tensor], bound: float, scales: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Each client's arrays (rows), in float64, times the factor that brings their joint norm to `bound`.

    Examples
    --------
    >>> clip_jointly({"a": torch.tensor([[3.0]]), "b": torch.tensor([[4.0]])}, 1.0)
    {'a': tensor([[0.6000]], dtype=torch.float64), 'b': tensor([[0.8000]], dtype=torch.float64)}
    """
    wide = {name: array.to(torch.float64) for name, array in arrays.items()}
    if not math.isfinite(bound):
        return wide
    square = sum(
        (array / (scales or {}).get(name, 1.0)).flatten(1).square().sum(1)
        if array.ndim > 1
        else (array / (scales or {}).get(name, 1.0)).square()
        for name, array in wide.items()
    )
    assert isinstance(square, Tensor)
    factor = (bound / square.sqrt()).clamp_(max=1.0)
    return {name: array * factor.reshape(-1, *[1] * (array.ndim - 1)) for name, array in wide.items()}


def _add_noise(array: Tensor, deviation: float, coding: Coding | None, generator: torch.Generator) -> None:
    """Add Gaussian noise in place; on the steps of a ring, where there is one."""
    if coding is None:
        noise = torch.randn(array.shape, dtype=array.dtype, device=array.device, generator=generator)
        array.add_(noise, alpha=deviation)
    else:
        noise = discrete_gaussian(array.shape, deviation / coding.step, generator)
        array.div_(coding.step).round_().add_(noise).mul_(coding.step)


def discrete_gaussian(shape: Sequence[int], deviation: float, generator: torch.Generator) -> Tensor:
    """Integers k, as float64, with probability proportional to exp(-k²/2σ²); for σ of 4 and more.

    Draw x from N(0, σ²) and let k be the nearest integer, u = x - k. Kept with probability proportional to
    exp((2ku + u²)/2σ²), the pairs (k, u) have density proportional to exp(-k²/2σ²), whatever u.
    """
    device = generator.device
    count = math.prod(shape)
    result = torch.empty(count, dtype=torch.float64, device=device)
    pending = torch.arange(count, device=device)
    ceiling = _TAIL * deviation + 0.25
    while pending.numel():
        x = torch.randn(pending.numel(), dtype=torch.float64, device=device, generator=generator) * deviation
        chance = torch.rand(pending.numel(), dtype=torch.float64, device=device, generator=generator)
        k = x.round()
        kept = (chance.log_().mul_(2 * deviation**2) < x * x - k * k - ceiling) & (
            k.abs() <= _TAIL * deviation
        )
        result[pending[kept]] = k[kept]
        pending = pending[~kept]
    return result.reshape(tuple(shape))
