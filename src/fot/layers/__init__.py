"""Protected layers: which weights of a model act on inputs, and both as matrices."""

from fot.layers.find import Protection, find_layers
from fot.layers.layer import Layer
from fot.layers.record import keeps_samples_apart, recorded_inputs

__all__ = ["Layer", "Protection", "find_layers", "keeps_samples_apart", "recorded_inputs"]
