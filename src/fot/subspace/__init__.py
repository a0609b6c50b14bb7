"""The paper's mathematics: the client's sketch of its layer inputs, the server's memory of subspaces."""

from fot.subspace.memory import Growth, SubspaceMemory, threshold_at
from fot.subspace.sketch import Size, Sketch, sample_size, sketch

__all__ = ["Growth", "Size", "Sketch", "SubspaceMemory", "sample_size", "sketch", "threshold_at"]
