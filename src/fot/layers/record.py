"""See the inputs of protected layers while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from fot.errors import UserError
from fot.layers.layer import Layer


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
