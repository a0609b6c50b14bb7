"""The memory that a sketch takes does not grow with the samples."""

from __future__ import annotations

from fot.subspace.bench import sketch_memory


def test_the_sketch_of_a_wide_layer_stays_within_its_limit() -> None:
    """The figures of `fot bench sketch`, which takes 100,000 samples: as many columns as inputs, s = d.

    30,000 samples would take 246 MB by themselves, were they kept, and twice that with their residuals.
    """
    few, many = (sketch_memory(width=2048, samples=samples, size="d") for samples in (10_000, 30_000))
    assert few["sketch_mb"] == many["sketch_mb"] == 2048 * 2048 * 4 / 1e6
    assert 16 < float(many["extra_mb"]) < float(many["limit_mb"]) == 400
    # The samples between the two are 164 MB; the allocator alone moves a peak by 15 or so.
    assert abs(float(many["extra_mb"]) - float(few["extra_mb"])) < 60
