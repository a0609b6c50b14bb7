"""See the inputs of protected layers while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fot.errors import UserError
from fot.layers.layer import Layer

# The share of an input's norm by which samples apart may differ from samples together: far more than rounding
# in any precision, far less than where samples are mixed.
APART = 1e-2


@contextmanager
def recorded_inputs(
    model: nn.Module, layers: Sequence[Layer], receive: Callable[[Layer, Tensor], None]
) -> Iterator[None]:
    """Within this context, `receive(layer, input)` is called each time one of `layers` is about to run.

    It works under `torch.func.functional_call` too. A layer that runs twice in one pass is received twice.

    Examples
    --------
    >>> import torch
    >>> from fot.layers import find_layers
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> layers = find_layers(model).layers
    >>> with recorded_inputs(model, layers, lambda layer, x: print(layer.name, tuple(x.shape))):
    ...     _ = model(torch.ones(5, 3))
    0 (5, 3)
    2 (5, 2)
    """
    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for layer in layers:
            if layer.name not in modules:
                raise UserError(f"the model has no layer '{layer.name}': find the layers of this very model")

            def hook(
                _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], layer: Layer = layer
            ) -> None:
                receive(layer, args[0] if args else kwargs["input"])

            handle = modules[layer.name].register_forward_pre_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


@torch.no_grad()
def keeps_samples_apart(
    model: nn.Module, layers: Sequence[Layer], x: Tensor, forward: Callable[[Tensor], object] | None = None
) -> bool:
    """Whether each of `layers` receives a sample's inputs whatever else is in the batch, and once a pass.

    Only then can samples of several clients share a batch. It is tried: the first two and the last two
    samples of `x`, at once and two by two. Inputs that are not finite tell nothing against it.

    Examples
    --------
    >>> from fot.layers import find_layers
    >>> model, x = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)), torch.eye(3)
    >>> layers = find_layers(model).layers
    >>> keeps_samples_apart(model, layers, x), keeps_samples_apart(model, layers, x, forward=model[1])
    (False, True)
    """

    def received(samples: Tensor) -> dict[str, list[Tensor]]:
        inputs: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
        with recorded_inputs(model, layers, lambda layer, x: inputs[layer.name].append(x)):
            (forward or model)(samples)
        return inputs

    together, *parts = (received(s) for s in (torch.cat([x[:2], x[-2:]]), x[:2], x[-2:]))
    far = []
    for name, (whole, *more) in ((name, inputs) for name, inputs in together.items() if inputs):
        first, last = (part[name][0] for part in parts)
        if more or first.shape[1:] != last.shape[1:]:
            return False
        alone = torch.cat([first, last])
        if alone.shape != whole.shape:
            return False
        far.append((alone - whole).norm() > APART * whole.norm())  # False of what is not finite
    return not bool(torch.stack(far).any()) if far else True
