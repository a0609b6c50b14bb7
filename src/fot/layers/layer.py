"""One protected layer: its weights and its inputs as matrices.

A layer computes ``W X`` where ``W`` (out x d) holds its weights and every column of ``X`` (d x N) is one
input it meets: a sample for a linear layer, a token where there are tokens, a patch for a convolution.
A convolution in ``g`` groups is ``g`` independent layers on slices of the channels, so every matrix carries
a leading group axis: ``W`` is [g, out/g, d] and ``X`` is [g, d, N], with g = 1 for all other layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fot.errors import UserError

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Layer:
    """A Linear or Conv1d/2d/3d layer whose weights act on its inputs as ``W X``.

    Parameters
    ----------
    name : str
        The module's name in the model ("" for the model itself).
    kind : str
        "Linear", "Conv1d", "Conv2d" or "Conv3d".
    groups : int
        g, the number of independent matrices.
    dimension : int
        d, the length of a column: input features, or channels / g times the kernel's cells; one more when the
        bias is protected, as the weight of an input that is always 1.
    outputs : int
        Output features or channels, over all groups.
    weight, bias : str, str or None
        Names in the tree of parameters; `bias` only when it is protected.
    shape : tuple of int
        The weight's own shape.
    stride, dilation, pad, pad_mode
        The geometry of a convolution; `pad` in the order of `torch.nn.functional.pad`.

    Examples
    --------
    >>> import torch
    >>> conv = torch.nn.Conv2d(4, 6, 3, groups=2, bias=False)
    >>> layer = Layer.of("conv", conv, weight="conv.weight")
    >>> layer.matrix({"conv.weight": conv.weight}).shape     # [g, out/g, d], d = 4/2 * 3 * 3
    torch.Size([2, 3, 18])
    >>> layer.columns(torch.ones(5, 4, 8, 8)).shape          # [g, d, N], N = 5 samples of 6 x 6 patches
    torch.Size([2, 18, 180])
    """

    name: str
    kind: str
    groups: int
    dimension: int
    outputs: int
    weight: str
    bias: str | None
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    pad: tuple[int, ...] = ()
    pad_mode: str = "constant"

    @classmethod
    def of(cls, name: str, module: nn.Linear | Convolution, weight: str, bias: str | None = None) -> Layer:
        """Describe `module`, whose parameters are called `weight` and (if it is to be protected) `bias`."""
        shape = tuple(module.weight.shape)
        dimension = prod(shape[1:]) + (bias is not None)
        if isinstance(module, nn.Linear):
            return cls(name, "Linear", 1, dimension, shape[0], weight, bias, shape)
        kind = next(k for k in ("Conv1d", "Conv2d", "Conv3d") if isinstance(module, getattr(nn, k)))
        if isinstance(module.padding, str):  # "same" puts the odd cell at the end, "valid" pads nothing
            span = [
                r * (k - 1) * (module.padding == "same")
                for k, r in zip(shape[2:], module.dilation, strict=True)
            ]
            sides = [(total // 2, total - total // 2) for total in span]
        else:
            sides = [(p, p) for p in module.padding]
        pad = tuple(p for side in reversed(sides) for p in side)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return cls(
            name, kind, module.groups, dimension, shape[0], weight, bias, shape,
            tuple(module.stride), tuple(module.dilation), pad, mode,
        )  # fmt: skip

    def matrix(self, params: Mapping[str, Tensor]) -> Tensor:
        """W as [..., g, out/g, d], from a tree of parameters or of their updates.

        Leading axes beyond the parameter's own (a cohort's stacked updates) are kept.
        """
        w = self._entry(params, self.weight, self.shape)
        rows = self.outputs // self.groups
        lead = w.shape[: w.dim() - len(self.shape)]
        matrix = w.reshape(*lead, self.groups, rows, prod(self.shape[1:]))
        if self.bias is None:
            return matrix
        b = self._entry(params, self.bias, (self.outputs,))
        if b.shape[:-1] != lead:
            raise UserError(
                f"'{self.bias}' and '{self.weight}' have different leading axes: stack both alike"
            )
        return torch.cat([matrix, b.reshape(*lead, self.groups, rows, 1)], dim=-1)

    def unmatrix(self, matrix: Tensor) -> dict[str, Tensor]:
        """The entries of the tree that `matrix` came from: the inverse of `matrix`."""
        lead = matrix.shape[:-3]
        if self.bias is None:
            return {self.weight: matrix.reshape(*lead, *self.shape)}
        return {
            self.weight: matrix[..., :-1].reshape(*lead, *self.shape),
            self.bias: matrix[..., -1].reshape(*lead, self.outputs),
        }

    def batched(self, x: Tensor) -> Tensor:
        """The module's input with exactly one leading axis, as [N, features] or [N, channels, ...]."""
        if self.kind == "Linear":
            good, x = x.shape[-1:] == self.shape[1:], x.reshape(-1, *x.shape[-1:])
        else:
            x = x.unsqueeze(0) if x.dim() == len(self.shape) - 1 else x
            good = x.dim() == len(self.shape) and x.shape[1] == self.groups * self.shape[1]
        if not good:
            raise UserError(
                f"layer '{self.name}' ({self.kind}, weight {self.shape}) cannot take an input of shape "
                f"{tuple(x.shape)}: give it what the module itself receives"
            )
        return x

    def columns(self, x: Tensor) -> Tensor:
        """X as [g, d, N], from the module's input; sample by sample, patches in reading order."""
        x = self.batched(x)
        if self.kind == "Linear":
            x = x.mT.unsqueeze(0)
        else:
            kernel = self.shape[2:]
            n = len(kernel)
            if any(self.pad):
                x = F.pad(x, self.pad, mode=self.pad_mode)
            for axis in range(n):  # each spatial axis becomes (positions, ..., cells of the kernel)
                reach = self.dilation[axis] * (kernel[axis] - 1) + 1
                x = x.unfold(2 + axis, reach, self.stride[axis])[..., :: self.dilation[axis]]
            x = torch.unflatten(x, 1, (self.groups, self.shape[1]))
            positions, cells = range(3, 3 + n), range(3 + n, 3 + 2 * n)
            x = x.permute(1, 2, *cells, 0, *positions).reshape(self.groups, prod(self.shape[1:]), -1)
        return x if self.bias is None else F.pad(x, (0, 0, 0, 1), value=1.0)

    @staticmethod
    def _entry(params: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in params:
            raise UserError(f"the tree has no '{name}': give the parameters, or an update, of the same model")
        tensor = params[name]
        if tuple(tensor.shape[max(0, tensor.dim() - len(shape)) :]) != shape:
            raise UserError(f"'{name}' has shape {tuple(tensor.shape)}, not {shape}: is it of another model?")
        return tensor
