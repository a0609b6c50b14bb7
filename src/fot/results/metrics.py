"""Accuracy, forgetting and transfer, computed from one accuracy matrix.

The matrix is a list of rows: ``accuracy[i][t]`` is the test accuracy on task ``i``, in percent, after
training on task ``t``. It is ``None`` where ``t < i``, when task ``i`` had not been seen. With K tasks the
last column holds what the final model can do. Where a quantity needs an earlier task and there is none
(K = 1), the result is ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Matrix = Sequence[Sequence[float | None]]


def _at(accuracy: Matrix, task: int, after: int) -> float:
    value = accuracy[task][after]
    if value is None:
        raise ValueError(f"accuracy[{task}][{after}] is missing: task {task} was trained and not evaluated")
    return value


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def average_curve(accuracy: Matrix) -> list[float]:
    """Return the mean accuracy over the tasks seen so far, after each task.

    Examples
    --------
    >>> average_curve([[90.0, 80.0], [None, 70.0]])
    [90.0, 75.0]
    """
    return [sum(_at(accuracy, i, t) for i in range(t + 1)) / (t + 1) for t in range(len(accuracy))]


def average_accuracy(accuracy: Matrix) -> float | None:
    """Return ACC, the mean of the last column: ``1/K sum_i a_iK``.

    Examples
    --------
    >>> average_accuracy([[90.0, 80.0], [None, 70.0]])
    75.0
    """
    return average_curve(accuracy)[-1] if accuracy else None


def forgetting_by_task(accuracy: Matrix) -> list[float]:
    """Return ``a_ii - a_iK`` for every task but the last: what each task has lost since it was learnt.

    Examples
    --------
    >>> forgetting_by_task([[90.0, 85.0, 80.0], [None, 70.0, 71.0], [None, None, 60.0]])
    [10.0, -1.0]
    """
    last = len(accuracy) - 1
    return [_at(accuracy, i, i) - _at(accuracy, i, last) for i in range(last)]


def forgetting(accuracy: Matrix) -> float | None:
    """Return FGT as the paper defines it: the mean of ``a_ii - a_iK`` over the tasks before the last.

    Examples
    --------
    >>> forgetting([[90.0, 85.0, 80.0], [None, 70.0, 71.0], [None, None, 60.0]])
    4.5
    >>> forgetting([[90.0]]) is None
    True
    """
    return _mean(forgetting_by_task(accuracy))


def forgetting_max(accuracy: Matrix) -> float | None:
    """Return forgetting from the best past accuracy: the mean of ``max_{t<K} a_it - a_iK`` (Chaudhry 2018).

    It is never below :func:`forgetting`, which looks back to the moment of learning only.

    Examples
    --------
    >>> forgetting_max([[90.0, 95.0, 80.0], [None, 70.0, 71.0], [None, None, 60.0]])
    7.0
    """
    last = len(accuracy) - 1
    best = [max(_at(accuracy, i, t) for t in range(i, last)) for i in range(last)]
    return _mean([best[i] - _at(accuracy, i, last) for i in range(last)])


def backward_transfer(accuracy: Matrix) -> float | None:
    """Return BWT, the mean of ``a_iK - a_ii``: what later tasks gave to (or took from) earlier ones.

    Examples
    --------
    >>> backward_transfer([[90.0, 80.0], [None, 70.0]])
    -10.0
    """
    lost = forgetting(accuracy)
    return None if lost is None else 0.0 - lost  # 0 - 0 is 0, while -0.0 would print as "-0.00"


def forward_transfer(
    zero_shot: Sequence[float | None] | None, initial: Sequence[float | None] | None
) -> float | None:
    """Return FWT, the mean over all tasks but the first of ``zero_shot_t - initial_t`` (Lopez-Paz 2017).

    Parameters
    ----------
    zero_shot
        Accuracy on each task just before it is trained; ``None`` where a new head makes that meaningless.
    initial
        Accuracy on each task of the model before any training.

    Examples
    --------
    >>> forward_transfer([10.0, 14.0, 18.0], [10.0, 10.0, 8.0])
    7.0
    >>> forward_transfer(None, None) is None
    True
    """
    if zero_shot is None or initial is None:
        return None
    pairs = list(zip(zero_shot, initial, strict=True))[1:]
    gains = [after - before for after, before in pairs if after is not None and before is not None]
    return _mean(gains) if len(gains) == len(pairs) else None


def used_subspace(subspace: Mapping[str, Sequence[float]], after: int = -1) -> float | None:
    """Return the share of the input space in use after a task, averaged over layers as in the paper's table.

    Parameters
    ----------
    subspace
        Layer to its share after each task, in percent.
    after
        Which task; the last one by default.

    Examples
    --------
    >>> used_subspace({"a": [10.0, 50.0], "b": [0.0, 20.0]})
    35.0
    """
    return _mean([shares[after] for shares in subspace.values() if len(shares) > 0])
