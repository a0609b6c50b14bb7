"""The client's side of GPSE: a random sketch of the part of its layer inputs that is not yet protected.

For each layer, X* = X - O Oᵀ X and A = X* G, where G is an N x s matrix of independent standard normal
numbers. X is met batch by batch and never kept: the memory is that of A, d x s, and of one chunk of columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from fot.errors import NotFinite, UserError
from fot.layers import Layer, recorded_inputs
from fot.randomness import fold, generator
from fot.subspace.extraction import is_full

Size = int | str | Mapping[str, int | str]
"""A sampling dimension s: a number (400), a multiple of d ("d", "5d", "0.5d"), or one of these by layer,
``{"conv*": "d", "*": "5d"}``, where the first pattern that matches a layer's name counts."""

CHUNK = 1 << 22  # numbers held at once in a chunk of columns, or of G
ROWS = 128  # rows of G drawn at a time, whatever the batches: so that G does not depend on the batch size


def sample_size(layer: Layer, size: Size) -> int:
    """The number of columns s of a layer's sketch.

    Examples
    --------
    >>> layer = Layer.of("fc", nn.Linear(20, 5), "fc.weight")
    >>> sample_size(layer, 7), sample_size(layer, "d"), sample_size(layer, {"conv*": 3, "*": "2.5d"})
    (7, 20, 50)
    """
    if isinstance(size, Mapping):
        found = next((s for pattern, s in size.items() if fnmatchcase(layer.name, pattern)), None)
        if found is None:
            raise UserError(
                f"no sketch size is given for layer '{layer.name}': add it, or '*' for all others"
            )
        size = found
    if isinstance(size, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+)?|)d", size.replace(" ", ""))
        s = round(float(parts[1] or 1) * layer.dimension) if parts else 0
    else:
        s = int(size) if isinstance(size, Integral) and not isinstance(size, bool) else 0
    if s < 1:
        raise UserError(
            f"a sketch size of {size!r} is none: give a number such as 400, or a multiple such as '5d'"
        )
    return s


def check_basis(layer: Layer, basis: Tensor) -> None:
    """Refuse what cannot be a basis O [g, d, r] of this layer's inputs."""
    g, d, shape = layer.groups, layer.dimension, tuple(basis.shape)
    if len(shape) != 3 or shape[:2] != (g, d) or shape[2] > d:
        raise UserError(
            f"the basis of layer '{layer.name}' has shape {shape}, not ({g}, {d}, at most {d}): "
            "is it of another model, or with bias=True and the layer without?"
        )


class Sketch:
    """The running sketch of one client, or of any set of samples.

    Parameters
    ----------
    layers : sequence of Layer
    bases : mapping
        The protected bases O [g, d, r] by layer name; a layer that is missing has none yet, and one that is
        full is left out, since nothing of it is new.
    size : Size
        The sampling dimension s, a number or a multiple of d, the same or by layer.
    key : int
        Names the draw of G; clients that are to be independent need different keys.
    exact : bool
        Keep X* X*ᵀ (d x d) in place of X* G: for simulations, where the server draws the sketch from it.
    dtype, device
        Those of the model; half precision is sketched in float32.

    Notes
    -----
    The columns of X take the rows of G in the order in which they come, so that a sketch depends on the order
    of the samples but, rounding apart, not on how they are cut into batches.

    How well it does: where the k-th singular value of X* stands out, the k leading directions of A lie within
    an angle of sin θ <= 4 (σ_{k+1} / σ_k) √(d / s) of those of X*, for s >= d and k <= d / 8 (tested).
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        bases: Mapping[str, Tensor],
        *,
        size: Size,
        key: int,
        exact: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for layer in layers:
            if layer.name in bases:
                check_basis(layer, bases[layer.name])
        self.layers = tuple(
            layer for layer in layers if layer.name not in bases or not is_full(bases[layer.name])
        )
        self.exact = exact
        self.dtype = torch.promote_types(dtype, torch.float32)
        self._bases = {name: basis.to(device, self.dtype) for name, basis in bases.items() if basis.shape[-1]}
        self._sums: dict[str, Tensor] = {}
        self._energies: dict[str, Tensor] = {}  # [2, g]: of X* and of X
        self._rows: dict[str, _GaussianRows] = {}
        for position, layer in enumerate(layers):
            if layer not in self.layers:
                continue
            g, d = layer.groups, layer.dimension
            s = d if exact else sample_size(layer, size)
            self._sums[layer.name] = torch.zeros(g, d, s, dtype=self.dtype, device=device)
            self._energies[layer.name] = torch.zeros(2, g, dtype=torch.float64, device=device)
            if not exact:
                self._rows[layer.name] = _GaussianRows(fold(key, position), g, s, self.dtype, device)

    @torch.no_grad()
    def update(self, layer: Layer, x: Tensor) -> None:
        """Take in what `layer` receives: an input of its module, of any number of samples."""
        x = layer.batched(x)
        if layer not in self.layers or not x.numel():
            return
        a = self._sums[layer.name]
        wide = x[0].numel() * prod(layer.shape[2:])  # of the columns of one sample, at stride 1
        with torch.autocast(x.device.type, enabled=False):
            for part in torch.split(x, max(1, CHUNK // wide)):
                columns = layer.columns(part.to(self.dtype))
                for chunk in torch.split(columns, max(ROWS, CHUNK // (a.shape[0] * a.shape[2])), dim=-1):
                    self._add(layer.name, chunk)

    def _add(self, name: str, x: Tensor) -> None:
        residual = x
        if name in self._bases:
            basis = self._bases[name]
            residual = torch.baddbmm(x, basis, basis.mT @ x, alpha=-1)
        self._energies[name] += torch.stack([_energy(residual), _energy(x)])
        other = residual.mT if self.exact else self._rows[name].take(x.shape[-1])
        self._sums[name].baddbmm_(residual, other)

    def result(self, samples: int) -> dict[str, Tensor]:
        """The arrays to be summed over clients, of which this one holds `samples` samples.

        ``{layer}/sketch`` [g, d, s] = A (or ``{layer}/gram`` [g, d, d]), ``{layer}/residual`` [g] = ‖X*‖²,
        ``{layer}/energy`` [g] = ‖X‖², ``{layer}/ratio`` [g] = n ‖X*‖ / ‖X‖ and ``samples`` [] = n. A layer
        that received nothing, or nothing but zeros, gives zeros. The arrays are the running ones, not copies:
        take them last.
        """
        arrays = {}
        device: torch.device | str = "cpu"
        for name, total in self._sums.items():
            residual, energy = self._energies[name]
            if not bool(torch.isfinite(energy).all()) or not bool(torch.isfinite(total).all()):
                raise NotFinite(
                    f"layer '{name}' received NaN, infinite or overflowing inputs: the model has diverged "
                    "or the data are damaged; lower the learning rate or check the data"
                )
            ratio = samples * torch.sqrt(residual / energy.clamp_min(torch.finfo(torch.float64).tiny))
            arrays[f"{name}/gram" if self.exact else f"{name}/sketch"] = total
            arrays |= {f"{name}/residual": residual, f"{name}/energy": energy, f"{name}/ratio": ratio}
            device = total.device
        arrays["samples"] = torch.tensor(float(samples), dtype=torch.float64, device=device)
        return arrays


class _GaussianRows:
    """The rows of G, one after another, as [g, n, s]; drawn in blocks of `ROWS`, however they are taken."""

    def __init__(
        self, key: int, groups: int, size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._generator = generator(key, device)
        self._spare = torch.empty(0, groups, size, dtype=dtype, device=device)

    def take(self, n: int) -> Tensor:
        blocks = -(-(n - len(self._spare)) // ROWS)
        rows = self._spare
        if blocks > 0:
            drawn = rows.new_empty(blocks * ROWS, *rows.shape[1:])
            for block in torch.split(drawn, ROWS):
                block.normal_(generator=self._generator)
            rows = torch.cat([rows, drawn])
        self._spare = rows[n:].clone()
        return rows[:n].transpose(0, 1)


def _energy(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64)
    return norm**2


def sketch(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    bases: Mapping[str, Tensor],
    *,
    size: Size,
    key: int,
    exact: bool = False,
    forward: Callable[[Any], object] | None = None,
) -> dict[str, Tensor]:
    """Sketch the layer inputs that a client's data cause in a model.

    Parameters
    ----------
    model : nn.Module
        Run in eval mode and without gradients; each module's training flag is restored.
    batches : iterable
        Batches of inputs, or of tuples that start with the inputs, as a DataLoader gives them. A client
        without data gives zeros.
    layers, bases, size, key, exact
        As for `Sketch`.
    forward : callable, optional
        How a batch's inputs are run, where ``model(inputs)`` will not do: a task's head, other parameters.

    Returns
    -------
    dict of str to Tensor
        The arrays of `Sketch.result`.

    Examples
    --------
    >>> from fot.layers import find_layers
    >>> model = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> layers = find_layers(model).layers
    >>> arrays = sketch(model, [torch.ones(4, 6), torch.ones(1, 6)], layers, {}, size="2d", key=1)
    >>> arrays["0/sketch"].shape, round(arrays["0/energy"].item()), arrays["samples"].item()
    (torch.Size([1, 6, 12]), 30, 5.0)
    """
    parameter = next(model.parameters())
    running = Sketch(
        layers, bases, size=size, key=key, exact=exact, dtype=parameter.dtype, device=parameter.device
    )
    training = {module: module.training for module in model.modules()}
    samples = 0
    try:
        model.eval()
        with torch.no_grad(), recorded_inputs(model, running.layers, running.update):
            for batch in batches:
                x = batch[0] if isinstance(batch, tuple | list) else batch
                if len(x):
                    (forward or model)(x)
                    samples += len(x)
    finally:
        for module, flag in training.items():
            module.training = flag
    return running.result(samples)
