"""The client's side of GPSE: a random sketch of the part of its layer inputs that is not yet protected.

For each layer, X* = X - O Oᵀ X and A = X* G, where G is an N x s matrix of independent standard normal
numbers. X is met batch by batch and never kept: the memory is that of A, d x s, and of one chunk of columns.

The sum over clients (10) is one sketch of all their columns, where each client's take the rows of its own G.
So clients that use one model can be sketched together: no client's A is formed, only the sum.
"""

from __future__ import annotations

import re
from collections import deque
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

Owners = Sequence[tuple[int, int]]
"""Whose samples or columns these are, one client after another: (client, how many)."""

CHUNK = 1 << 22  # numbers held at once in a chunk of columns, or of G
GPU_CHUNK = 1 << 25  # the same on a GPU, where each chunk has the price of some launches
ROWS = 128  # rows of G drawn at a time; later more, see `_GaussianRows`
BLOCK = 1 << 20  # numbers drawn at a time at most, unless `ROWS` rows have more


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
    """The running sketch of one client, or the sum of those of several.

    Parameters
    ----------
    layers : sequence of Layer
    bases : mapping
        The protected bases O [g, d, r] by layer name; a layer that is missing has none yet, and one that is
        full is left out, since nothing of it is new.
    size : Size
        The sampling dimension s, a number or a multiple of d, the same or by layer.
    key : int or sequence of int
        Names the draw of G; clients that are to be independent need different keys. Several clients that are
        sketched together have one each.
    exact : bool
        Keep X* X*ᵀ (d x d) in place of X* G: for simulations, where the server draws the sketch from it.
    dtype, device
        Those of the model; half precision is sketched in float32.

    Notes
    -----
    The columns of X take the rows of G in the order in which they come, so that a sketch depends on the order
    of the samples but, rounding apart, not on how they are cut into batches. Those of several clients come
    client after client, and each client's take the rows that they would take alone.

    How well it does: where the k-th singular value of X* stands out, the k leading directions of A lie within
    an angle of sin θ <= 4 (σ_{k+1} / σ_k) √(d / s) of those of X*, for s >= d and k <= d / 8 (tested).
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        bases: Mapping[str, Tensor],
        *,
        size: Size,
        key: int | Sequence[int],
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
        self._energies: dict[str, Tensor] = {}  # [clients, 2, g]: of X* and of X
        self._keys = [key] if isinstance(key, int) else list(key)
        self._positions = {layer.name: position for position, layer in enumerate(layers)}
        self._rows: dict[str, tuple[int, _GaussianRows]] = {}  # of the client whose columns are coming
        for layer in self.layers:
            g, d = layer.groups, layer.dimension
            s = d if exact else sample_size(layer, size)
            self._sums[layer.name] = torch.zeros(g, d, s, dtype=self.dtype, device=device)
            self._energies[layer.name] = torch.zeros(
                len(self._keys), 2, g, dtype=torch.float64, device=device
            )

    @torch.no_grad()
    def update(self, layer: Layer, x: Tensor, owners: Owners = ((0, 1),)) -> None:
        """Take in what `layer` receives: an input of its module, of any number of samples.

        Where there are several clients, `owners` says how many of the samples are whose. A client's samples
        then come to a layer in one go, or in batches that follow each other.
        """
        x = layer.batched(x)
        if layer not in self.layers or not x.numel():
            return
        a = self._sums[layer.name]
        most = CHUNK if x.device.type == "cpu" else GPU_CHUNK
        wide = x[0].numel() * prod(layer.shape[2:])  # of the columns of one sample, at stride 1
        each = len(x) // sum(n for _, n in owners)  # a sample may be several tokens
        whose = deque((client, n * each) for client, n in owners)
        with torch.autocast(x.device.type, enabled=False):
            for part in torch.split(x, max(1, most // wide)):
                columns = layer.columns(part.to(self.dtype))
                patches = columns.shape[-1] // len(part)
                of_part = deque((client, n * patches) for client, n in _taken(whose, len(part)))
                for chunk in torch.split(columns, max(ROWS, most // (a.shape[0] * a.shape[2])), dim=-1):
                    self._add(layer.name, chunk, _taken(of_part, chunk.shape[-1]))

    def _add(self, name: str, x: Tensor, owners: Owners) -> None:
        residual, energies = x, _energies(x)
        of_columns = torch.stack([energies, energies])
        if name in self._bases:
            basis = self._bases[name]
            residual = torch.baddbmm(x, basis, basis.mT @ x, alpha=-1)
            of_columns[0] = _energies(residual)
        own = [part.sum(-1) for part in torch.split(of_columns, [n for _, n in owners], dim=-1)]
        self._energies[name][owners[0][0] : owners[-1][0] + 1] += torch.stack(own)
        other = residual.mT if self.exact else self._gaussian(name, owners)
        self._sums[name].baddbmm_(residual, other)

    def _gaussian(self, name: str, owners: Owners) -> Tensor:
        """The next rows of the clients' G's, stacked: [g, n, s]."""
        a = self._sums[name]
        stacked = a.new_empty(sum(n for _, n in owners), a.shape[0], a.shape[2])
        for (client, _), rows in zip(owners, torch.split(stacked, [n for _, n in owners]), strict=True):
            if self._rows.get(name, (None,))[0] != client:
                key = fold(self._keys[client], self._positions[name])
                self._rows[name] = client, _GaussianRows(key, a.device)
            self._rows[name][1].fill(rows)
        return stacked.transpose(0, 1)

    def result(self, samples: int | Sequence[int]) -> dict[str, Tensor]:
        """The arrays to be summed over clients; `samples` says how many the client, or each client, holds.

        ``{layer}/sketch`` [g, d, s] = A (or ``{layer}/gram`` [g, d, d]), ``{layer}/residual`` [g] = ‖X*‖²,
        ``{layer}/energy`` [g] = ‖X‖², ``{layer}/ratio`` [g] = n ‖X*‖ / ‖X‖ and ``samples`` [] = n; of several
        clients, the sums of these. A layer that received nothing, or nothing but zeros, gives zeros. The
        arrays are the running ones, not copies: take them last.
        """
        device = next((total.device for total in self._sums.values()), None)
        held = [samples] if isinstance(samples, int) else samples
        n = torch.tensor(held, dtype=torch.float64, device=device)
        self._check_finite()
        arrays = {}
        for name, total in self._sums.items():
            residual, energy = self._energies[name].unbind(1)
            ratio = n[:, None] * torch.sqrt(residual / energy.clamp_min(torch.finfo(torch.float64).tiny))
            arrays[f"{name}/gram" if self.exact else f"{name}/sketch"] = total
            of_clients = {"residual": residual, "energy": energy, "ratio": ratio}
            arrays |= {f"{name}/{what}": each.sum(0) for what, each in of_clients.items()}
        arrays["samples"] = n.sum()
        return arrays

    def _check_finite(self) -> None:
        """Refuse sums that are not finite. All layers are looked at first: a GPU is waited for once."""
        checks = [self._energies[n].isfinite().all() & a.isfinite().all() for n, a in self._sums.items()]
        fine = torch.stack(checks).tolist() if checks else []
        for name in (name for name, ok in zip(self._sums, fine, strict=True) if not ok):
            raise NotFinite(
                f"layer '{name}' received NaN, infinite or overflowing inputs: the model has diverged "
                "or the data are damaged; lower the learning rate or check the data"
            )


class _GaussianRows:
    """The rows of a client's G, one after another, in blocks that do not depend on how they are taken.

    The first blocks have `ROWS` rows each, later ones an eighth of what was drawn before, up to `BLOCK`
    numbers: so a convolution's many patches take few draws, and a small client draws little in vain.
    """

    def __init__(self, key: int, device: torch.device | str) -> None:
        self._generator = generator(key, device)
        self._drawn = 0
        self._spare: Tensor | None = None

    def fill(self, rows: Tensor) -> None:
        """Write the next rows into `rows` [n, g, s], which is contiguous."""
        if self._spare is not None:
            kept = min(len(rows), len(self._spare))
            rows[:kept] = self._spare[:kept]
            rows, self._spare = rows[kept:], self._spare[kept:]
        while len(rows):
            block = max(ROWS, min(self._drawn // 8, BLOCK // rows[0].numel()))
            self._drawn += block
            if block <= len(rows):
                rows[:block].normal_(generator=self._generator)
            else:
                drawn = rows.new_empty(block, *rows.shape[1:]).normal_(generator=self._generator)
                rows[:] = drawn[: len(rows)]
                self._spare = drawn[len(rows) :]
            rows = rows[block:]


def _taken(whose: deque[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    """The owners of the next n, taken off the front of `whose`.

    Examples
    --------
    >>> whose = deque([(0, 3), (1, 2)])
    >>> _taken(whose, 4), whose
    ([(0, 3), (1, 1)], deque([(1, 1)]))
    """
    taken = []
    while n:
        client, held = whose.popleft()
        taken.append((client, min(n, held)))
        if held > n:
            whose.appendleft((client, held - n))
        n -= taken[-1][1]
    return taken


def _energies(x: Tensor) -> Tensor:
    """The energy of each column of x [g, d, n]."""
    return x.to(torch.float64, copy=True).square_().sum(1)


def sketch(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[Layer],
    bases: Mapping[str, Tensor],
    *,
    size: Size,
    key: int | Sequence[int],
    exact: bool = False,
    samples: Sequence[int] = (),
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
    samples : sequence of int, optional
        Where clients are sketched together, with a key each: how many of the samples are whose, in order.
        The layers must keep samples apart; see `fot.layers.keeps_samples_apart`.
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
    if len(samples or [0]) != (1 if isinstance(key, int) else len(key)):
        raise UserError("clients that are sketched together need a key and a number of samples each")
    parameter = next(model.parameters())
    running = Sketch(
        layers, bases, size=size, key=key, exact=exact, dtype=parameter.dtype, device=parameter.device
    )
    training = {module: module.training for module in model.modules()}
    whose, owners, seen = deque(enumerate(samples)), [(0, 1)], 0

    def receive(layer: Layer, x: Tensor) -> None:
        running.update(layer, x, owners)

    try:
        model.eval()
        with torch.no_grad(), recorded_inputs(model, running.layers, receive):
            for batch in batches:
                x = batch[0] if isinstance(batch, tuple | list) else batch
                seen += len(x)
                if samples and seen > sum(samples):
                    break
                if len(x):
                    owners = _taken(whose, len(x)) if len(samples) > 1 else owners
                    (forward or model)(x)
    finally:
        for module, flag in training.items():
            module.training = flag
    if samples and seen != sum(samples):
        raise UserError(
            f"the clients hold {sum(samples)} samples, the batches {seen}: say of each whose it is"
        )
    return running.result(samples or seen)
