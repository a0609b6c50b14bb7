"""The memory that a sketch takes does not grow with the samples."""

from __future__ import annotations

from fot.subspace.bench import sketch_memory


def test_the_sketch_of_a_wide_layer_stays_within_its_limit() -> None:
    """30,000 samples would take 246 MB by themselves, were they kept; 100,000 take `fot bench sketch`."""
    figures = sketch_memory(width=2048, samples=30_000, size=16)
    assert figures["sketch_mb"] == 2048 * 16 * 4 / 1e6
    assert 0 < float(figures["extra_mb"]) < 150
