"""The end of a task for many clients at once: their samples share batches, and only sums are formed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fot.aggregation.interface import AddTotal
from fot.engines.base import Extraction
from fot.errors import NotFinite
from fot.methods.base import ClientData, Method
from fot.network import Network

CPU_NUMBERS = 1 << 23
"""Numbers in the samples of the clients that are asked together, unless one alone holds more."""
GPU_NUMBERS = 1 << 26
"""The same on a GPU, where few and large pieces keep it busy."""


def add_pooled(
    network: Network,
    method: Method,
    extraction: Extraction,
    data: tuple[Tensor, Tensor],
    add_total: AddTotal,
) -> list[int]:
    """Add the statistics of the participants, piece by piece.

    Parameters
    ----------
    data
        The task's samples and labels on the device.

    Returns
    -------
    list of int
        The indices of participants that must be asked alone: those of a piece that the method cannot pool,
        that does not fit into memory, or whose total is not finite, so that one of them is to be left out.
    """
    x, y = data
    server, task = extraction.server, extraction.task
    participants, places = extraction.participants, extraction.places
    broadcast = method.broadcast(network, server)
    alone: list[int] = []
    sizes = [len(task.clients[client]) for client in participants]
    numbers = CPU_NUMBERS if x.device.type == "cpu" else GPU_NUMBERS
    for piece in pieces(sizes, numbers // max(1, x[:1].numel())):
        rows = torch.cat([task.clients[participants[i]] for i in piece]).to(x.device)
        held = [sizes[i] for i in piece]
        clients = [
            ClientData(own_x, own_y, task.index, extraction.key, participants[i], places[i])
            for i, own_x, own_y in zip(
                piece, torch.split(x[rows], held), torch.split(y[rows], held), strict=True
            )
        ]
        try:
            totals = method.pooled_statistics(network, server.params, clients, broadcast)
        except NotFinite:
            totals = None
        except torch.OutOfMemoryError:
            totals = None
            warnings.warn(
                "the GPU's memory does not hold the end of a task for many clients: some are asked alone",
                stacklevel=2,
            )
        if totals and bool(torch.stack([t.isfinite().all() for t in totals.values()]).all()):
            dtypes = {name: total.dtype for name, total in totals.items()}
            add_total([participants[i] for i in piece], totals, dtypes)
        else:
            alone += piece
    return alone


def pieces(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices one after another, in pieces whose sizes add up to at most ``most``, or of one alone.

    Examples
    --------
    >>> list(pieces([3, 4, 5, 9, 1], most=8))
    [[0, 1], [2], [3], [4]]
    """
    piece: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if piece and total + size > most:
            yield piece
            piece, total = [], 0
        piece.append(i)
        total += size
    if piece:
        yield piece
