"""Find the layers of any model that can be protected, and say why the rest is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fot.errors import UserError
from fot.layers.layer import Layer

PROTECTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FREE_BIAS = "a bias: left free, as in the paper (bias=True protects it with its layer)"


def has_heads(model: nn.Module) -> bool:
    """Whether `model` has a head for each task: an ``add_task``, and an ``nn.ModuleList`` named ``heads``.

    Whatever else is named ``heads`` is a part of the model like any other.
    """
    return hasattr(model, "add_task") and isinstance(getattr(model, "heads", None), nn.ModuleList)


def is_head(model: nn.Module, name: str) -> bool:
    """Whether the module or parameter `name` of `model` belongs to the head of a task."""
    return name.startswith("heads.") and has_heads(model)


@dataclass(frozen=True)
class Protection:
    """What `find_layers` found: the protected layers, and the rest with the reason for each.

    `shared` names the modules whose weight is also that of a protected layer, and so is projected with it.
    """

    layers: tuple[Layer, ...]
    skipped: dict[str, str]
    shared: dict[str, str]

    def summary(self) -> str:
        """A text that names what is protected, what is not, and why."""
        lines = [f"protected: {len(self.layers)} layer(s)"]
        for layer in self.layers:
            groups = f", {layer.groups} groups" if layer.groups > 1 else ""
            bias = ", with its bias" if layer.bias else ""
            name = layer.name or "(the model)"
            lines.append(f"  {name}: {layer.kind}, inputs of dimension {layer.dimension}{groups}{bias}")
        if self.shared:
            lines.append(f"protected through a weight they share: {len(self.shared)}")
            lines += [f"  {name or '(the model)'}: {reason}" for name, reason in self.shared.items()]
        lines.append(f"not protected: {len(self.skipped)}")
        lines += [f"  {name or '(the model)'}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def find_layers(
    model: nn.Module, protect: str | Sequence[str] | None = None, *, bias: bool = False
) -> Protection:
    """Find the protected layers of `model`, in the order in which it registers them.

    Parameters
    ----------
    model : nn.Module
    protect : str or sequence of str, optional
        Names or patterns (``conv*``) of the layers to protect. By default every Linear and Conv1d/2d/3d but
        the task heads of a multi-head model (see `has_heads`); a head named here is protected too.
    bias : bool
        Protect the trained biases of these layers too, as the weights of an input that is always 1; the paper
        does not.

    Returns
    -------
    Protection
        Every trained parameter belongs to one of its `layers` or is named, by itself or with its module, in
        `skipped`; so are running statistics, which drift.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    >>> print(find_layers(model).summary())
    protected: 2 layer(s)
      0: Linear, inputs of dimension 8
      2: Linear, inputs of dimension 4
    not protected: 2
      0.bias: a bias: left free, as in the paper (bias=True protects it with its layer)
      1: a norm layer (LayerNorm): its scale and shift act on each feature alone
    """
    patterns = (protect,) if isinstance(protect, str) else protect
    modules = dict(model.named_modules())
    names = {id(p): name for name, p in model.named_parameters()}
    attended = {id(m.out_proj) for m in modules.values() if isinstance(m, nn.MultiheadAttention)}
    owner: dict[int, str] = {}  # the layer that protects a weight
    layers: list[Layer] = []
    skipped: dict[str, str] = {}
    for name, module in modules.items():
        own = dict(module.named_parameters(recurse=False))
        if patterns is None and is_head(model, name):
            if own or isinstance(module, PROTECTABLE):
                skipped[name] = "a task head: it serves one task alone"
        elif not isinstance(module, PROTECTABLE):
            skipped |= _reasons(name, module, own)
        elif reason := _objection(name, module, names, attended, owner, patterns):
            skipped[name] = reason
        else:
            owner[id(module.weight)] = name
            free = _free_bias(module, names, bias)
            with_bias = names[id(module.bias)] if module.bias is not None and not free else None
            layers.append(Layer.of(name, module, names[id(module.weight)], with_bias))
            if free:
                skipped[f"{name}.bias" if name else "bias"] = free
    shared = _shared(modules, owner, skipped)
    found = Protection(tuple(layers), skipped, shared)
    for pattern in patterns or ():
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            choices = _choices(model, skipped | shared, pattern)
            raise UserError(f"'{pattern}' names no layer that can be protected; {choices}")
    if not layers:
        raise UserError(f"the model has no layer to protect; {found.summary()}".replace("\n", " "))
    return found


def _objection(
    name: str,
    module: nn.Module,
    names: dict[int, str],
    attended: set[int],
    owner: dict[int, str],
    patterns: Sequence[str] | None,
) -> str | None:
    """Why a Linear or Conv is not protected; None if it is."""
    weight = module.weight
    kind = type(module).__name__
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise UserError(f"layer '{name}' ({kind}) has no weights yet: run one batch through the model first")
    if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
        return "not among the layers that were named"
    if id(module) in attended:
        return "part of attention, which reads this weight without calling the layer: its inputs are not seen"
    if id(weight) not in names:
        return "its weight is computed from other parameters"
    if id(weight) in owner:
        return f"it shares its weight with '{owner[id(weight)]}'"
    if not weight.requires_grad:
        return "its weight is not trained (requires_grad is off)"
    if not any(type(module).forward is kind.forward for kind in PROTECTABLE):
        return f"its class {kind} has a forward of its own, which may not be W X"
    return None


def _reasons(name: str, module: nn.Module, own: dict[str, nn.Parameter]) -> dict[str, str]:
    """Why the parameters that `module` itself holds are not protected; nothing if it holds none."""
    kind = type(module).__name__
    if isinstance(module, NORMS):
        affine = ["its scale and shift act on each feature alone"] if own else []
        drift = ["its running statistics drift"] if getattr(module, "running_mean", None) is not None else []
        return {name: f"a norm layer ({kind}): {', and '.join(affine + drift)}"} if affine + drift else {}
    if not own:
        return {}
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return {name: f"an embedding ({kind}): a table that is looked up, not a matrix acting on inputs"}
    if isinstance(module, TRANSPOSED):
        return {name: f"a transposed convolution ({kind}): its inputs are spread, not gathered into patches"}
    if isinstance(module, nn.MultiheadAttention):
        return {name: "attention: its joint input projection is read without a layer of its own"}
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return {name: f"a recurrent layer ({kind}): its inner states are not seen from outside"}
    if isinstance(module, nn.Bilinear):
        return {name: "a bilinear layer: it acts on products of two inputs"}
    prefix = f"{name}." if name else ""
    return {f"{prefix}{p}": f"a parameter of {kind}, which is neither Linear nor Conv1d/2d/3d" for p in own}


def _free_bias(module: nn.Module, names: dict[int, str], bias: bool) -> str | None:
    """Why the bias of a protected layer is not protected with it; None if it is, or if there is none."""
    if module.bias is None or (bias and id(module.bias) in names and module.bias.requires_grad):
        return None
    if id(module.bias) not in names:
        return "a bias that is computed from other parameters"
    return FREE_BIAS if module.bias.requires_grad else "a bias that is not trained (requires_grad is off)"


def _shared(modules: dict[str, nn.Module], owner: dict[int, str], skipped: dict[str, str]) -> dict[str, str]:
    """Take out of `skipped` the modules whose parameters are projected after all, with a layer's own."""
    shared = {}
    for name in [name for name in skipped if name in modules]:
        own = dict(modules[name].named_parameters(recurse=False))
        holder = next((owner[id(p)] for p in own.values() if id(p) in owner), None)
        if holder is not None:
            shared[name] = (
                f"it shares its weight with '{holder}', which is protected for its own inputs alone"
            )
            del skipped[name]
            free = [p for p in own if id(own[p]) not in owner]
            skipped |= {f"{name}.{p}": "of a layer that is not protected for its own inputs" for p in free}
    return shared


def _choices(model: nn.Module, skipped: dict[str, str], pattern: str) -> str:
    """What to name instead of a pattern that named nothing."""
    refused = [f"{name}: {reason}" for name, reason in skipped.items() if fnmatchcase(name, pattern)]
    if refused:
        return "; ".join(refused[:3])
    return "choose among " + ", ".join(n for n, m in model.named_modules() if isinstance(m, PROTECTABLE))
