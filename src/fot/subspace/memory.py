"""The server's side of GPSE and FedProject: a memory of the subspaces that old tasks use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fot.errors import UserError
from fot.files import write_whole
from fot.layers import Layer
from fot.randomness import fold
from fot.subspace.extraction import (
    append,
    chosen_rank,
    is_full,
    principal_directions,
    ranks,
    sampled_gram,
    without_noise,
)
from fot.subspace.sketch import Size, check_basis, sample_size

FORMAT = 1


def threshold_at(task: int, first: float, increment: float) -> float:
    """The threshold of the 0-based `task`: th_1 + (t - 1) · increment, with t = task + 1, and at most 1.

    Examples
    --------
    >>> threshold_at(0, 0.87, 0.001), threshold_at(9, 0.87, 0.001)
    (0.87, 0.879)
    """
    return min(1.0, first + task * increment)


@dataclass(frozen=True)
class Growth:
    """What one expansion did to a layer; ranks and dimensions are summed over its groups.

    `covered` is the share (0-100) of the inputs' energy that was protected before; 0 where there was none.
    `exhausted`: every direction that a sketch of s < d columns can show was added, and the threshold may
    need more.
    """

    rank: int
    dimension: int
    added: int
    covered: float
    exhausted: bool = False

    @property
    def frozen(self) -> bool:
        """Whether the layer is full: no update changes it any more."""
        return self.rank == self.dimension


@dataclass(frozen=True)
class SubspaceMemory:
    """An orthonormal basis O of the inputs of old tasks, for each protected layer.

    A memory is never changed: `expand` and `freeze` return a new one. `bases` holds O [g, d, r] by layer
    name, OᵀO = I; a group of smaller rank ends in zero columns, and a full one is the identity.

    Examples
    --------
    >>> from torch import nn
    >>> from fot.layers import find_layers
    >>> from fot.subspace import sketch
    >>> model = nn.Linear(4, 2)
    >>> memory = SubspaceMemory.empty(find_layers(model).layers)
    >>> x = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0]])
    >>> sums = sketch(model, [x], memory.layers, memory.bases, size="5d", key=1)
    >>> memory, growth = memory.expand(sums, threshold=0.999)
    >>> growth[""].rank, memory.usage()
    (2, {'': 50.0})
    >>> update = memory.project({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
    >>> bool((update["weight"] @ x.T).abs().max() < 1e-6), update["bias"].tolist()
    (True, [1.0, 1.0])
    """

    layers: tuple[Layer, ...]
    bases: dict[str, Tensor]

    def __post_init__(self) -> None:
        for layer in self.layers:
            if layer.name not in self.bases:
                raise UserError(
                    f"the memory lacks a basis of '{layer.name}': start from SubspaceMemory.empty"
                )
            check_basis(layer, self.bases[layer.name])

    @classmethod
    def empty(
        cls,
        layers: Sequence[Layer],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> SubspaceMemory:
        """The memory before the first task; give the model's own dtype and device."""
        dtype = torch.promote_types(dtype, torch.float32)  # a basis in half precision is not orthonormal
        return cls(
            tuple(layers),
            {
                layer.name: torch.zeros(layer.groups, layer.dimension, 0, dtype=dtype, device=device)
                for layer in layers
            },
        )

    def expand(
        self,
        sums: Mapping[str, Tensor],
        *,
        threshold: float,
        rule: str = "energy",
        key: int | None = None,
        size: Size | None = None,
    ) -> tuple[SubspaceMemory, dict[str, Growth]]:
        """Add the principal directions of a task, from sums over the clients of `Sketch.result`.

        Parameters
        ----------
        sums : mapping
            The summed arrays; a full layer needs none.
        threshold : float
            th, the share (0-1) of the energy that is to be protected.
        rule : {"energy", "authors"}
            How the number of directions is chosen; see `fot.subspace.extraction.chosen_rank`.
        key, size : optional
            For exact sums (``{layer}/gram``) only: the draw and the sampling dimension of the sketch that the
            server makes of them; without `size` it takes their directions as they are, as if s were infinite.
            Where they carry the noise of differential privacy, only what stands out from it counts.

        Returns
        -------
        SubspaceMemory
        dict of str to Growth
            What was added, by layer. A layer that no sample reached, or zeros alone, gains nothing.
        """
        if rule not in ("energy", "authors"):
            raise UserError(f"'{rule}' is no rank rule: choose 'energy' or 'authors'")
        if not 0 <= threshold <= 1:  # nor NaN
            raise UserError(
                f"a threshold of {threshold} is no share of the energy: give a number from 0 to 1"
            )
        samples = _array(sums, "samples", ())
        bases, growth = {}, {}
        for position, layer in enumerate(self.layers):
            basis = self.bases[layer.name]
            g, d = layer.groups, layer.dimension
            if is_full(basis):
                bases[layer.name], growth[layer.name] = basis, Growth(g * d, g * d, 0, 100.0)
                continue
            residual, energy, ratio = (
                _array(sums, f"{layer.name}/{what}", (g,)) for what in ("residual", "energy", "ratio")
            )
            s = d
            if f"{layer.name}/gram" in sums:
                gram = without_noise(_array(sums, f"{layer.name}/gram", (g, d, d)), basis)
                if size is not None:
                    if key is None:
                        raise UserError(
                            "exact sums are sketched by the server: give expand a key as well as a size"
                        )
                    s = sample_size(layer, size)
                    gram = sampled_gram(gram, s, fold(key, position))
            else:
                a = _array(sums, f"{layer.name}/sketch", (g, d, None))
                gram, s = a @ a.mT, a.shape[-1]
            directions, spectrum = principal_directions(gram, basis)
            mean_ratio = torch.where(ranks(basis) > 0, ratio / samples.clamp_min(1), torch.ones_like(ratio))
            chosen = chosen_rank(
                spectrum, residual, energy, mean_ratio, threshold, rule, torch.finfo(basis.dtype).eps
            )
            bases[layer.name] = append(basis, directions, chosen)
            before, after = int(ranks(basis).sum()), int(ranks(bases[layer.name]).sum())
            total = float(energy.sum())
            covered = 100 * min(1.0, max(0.0, 1 - float(residual.sum()) / total)) if total > 0 else 0.0
            exhausted = bool(((chosen >= s) & (ranks(basis) + s < d)).any())
            growth[layer.name] = Growth(after, g * d, after - before, covered, exhausted)
        return SubspaceMemory(self.layers, bases), growth

    def project(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """FedProject: Delta (I - O Oᵀ) for each protected layer; all else passes untouched.

        Leading axes, as of a stack of clients' updates, are allowed, and so is an update without some layers,
        but not one with half a layer: a protected bias and its weight come together.
        The product is formed in float64: its rounding would otherwise leak into the protected directions.
        """
        projected = dict(update)
        for layer in self.layers:
            basis = self.bases[layer.name]
            if layer.bias in update and layer.weight not in update:
                raise UserError(
                    f"the update has '{layer.bias}' without '{layer.weight}', and they are protected as one: "
                    "give both, or find the layers without bias=True"
                )
            if basis.shape[-1] and layer.weight in update:
                delta = layer.matrix(update)
                wide, O = delta.double(), basis.double()
                projected |= layer.unmatrix((wide - (wide @ O) @ O.mT).to(delta.dtype))
        return projected

    def usage(self) -> dict[str, float]:
        """The share (0-100) of each layer's input space that is protected."""
        return {
            layer.name: 100 * int(ranks(self.bases[layer.name]).sum()) / (layer.groups * layer.dimension)
            for layer in self.layers
        }

    def frozen(self) -> tuple[str, ...]:
        """The layers that are full, and so change no more."""
        return tuple(name for name, share in self.usage().items() if share == 100)

    def freeze(self, name: str) -> SubspaceMemory:
        """Protect all of a layer's input space: the paper's FRZ, for the first layer after the first task."""
        if name not in self.bases:
            raise UserError(f"no protected layer is called '{name}': choose among {', '.join(self.bases)}")
        basis = self.bases[name]
        identity = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device).repeat(
            basis.shape[0], 1, 1
        )
        return SubspaceMemory(self.layers, {**self.bases, name: identity})

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        path = Path(path)
        tensors = {name: basis.contiguous().cpu() for name, basis in self.bases.items()}
        # One entry of metadata: several would be written in no fixed order.
        content = safetensors.torch.save(tensors, {"fot": json.dumps(self._header(), sort_keys=True)})
        try:
            write_whole(path, content)
        except OSError as error:
            raise UserError(
                f"cannot write {path} ({error.strerror}): choose a folder you can write to"
            ) from None

    @classmethod
    def load(
        cls, path: str | Path, layers: Sequence[Layer], device: torch.device | str = "cpu"
    ) -> SubspaceMemory:
        """Read the file of a memory of these very `layers`."""
        path = Path(path)
        try:
            with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
                header = json.loads((file.metadata() or {})["fot"])
                bases = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise UserError(f"there is no memory file {path}: check the path") from None
        except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(
                f"{path} is no memory file, or is cut short ({error}): use another copy"
            ) from None
        found = header.get("format") if isinstance(header, dict) else None
        if found != FORMAT:
            raise UserError(
                f"{path} has format {found}, this version reads {FORMAT}: use the version that wrote it"
            )
        if header != cls.empty(layers)._header() or set(bases) != {layer.name for layer in layers}:
            raise UserError(f"{path} is the memory of another model: its layers are {header.get('layers')}")
        for layer in layers:
            _check(path, layer, bases[layer.name])
        return cls(tuple(layers), {layer.name: bases[layer.name] for layer in layers})

    def _header(self) -> dict[str, object]:
        shapes = {la.name: [la.groups, la.dimension, la.weight, la.bias] for la in self.layers}
        return {"format": FORMAT, "layers": shapes}


def _check(path: Path, layer: Layer, basis: Tensor) -> None:
    good = basis.dim() == 3 and basis.shape[:2] == (layer.groups, layer.dimension)
    if good:
        O = basis.double()
        identity = torch.diag_embed((O != 0).any(dim=1).double())
        good = bool(((O.mT @ O - identity).abs() < 1e-5).all())  # false for NaN too
    if not good:
        raise UserError(
            f"{path} is damaged: the basis of '{layer.name}' is not orthonormal; use another copy"
        )


def _array(sums: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """One summed array in float64, checked: sums come from afar."""
    if name not in sums:
        raise UserError(f"the sums lack '{name}': sum the arrays that sketch returns for these layers")
    array = sums[name].double()
    if array.dim() != len(shape) or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
        raise UserError(f"the sum '{name}' has shape {tuple(array.shape)}: is it of another model?")
    if not bool(torch.isfinite(array).all()):
        raise UserError(
            f"the sum '{name}' holds NaN or infinite numbers: a client's model or data are damaged"
        )
    return array
