from __future__ import annotations

import numpy as np
import torch

from fot.benchmarks.transforms import CropAndFlip, Pictures, standardise


def test_normalisation_is_of_values_between_0_and_1():
    raw = np.array([0, 51, 255], np.uint8).reshape(1, 3, 1, 1)
    x = Pictures((0.1, 0.2, 0.4), (0.5, 0.25, 2.0))(raw)
    assert torch.allclose(x.flatten(), torch.tensor([-0.2, 0.0, 0.3]), atol=1e-6)


def test_padding_is_black_before_normalisation():
    prepare = Pictures((0.1,), (0.2,), padding=2, channels=3)
    x = prepare(np.full((2, 1, 28, 28), 255, np.uint8))
    assert x.shape == (2, 3, 32, 32) and x.is_contiguous()
    assert torch.allclose(x[:, :, :2], torch.tensor(-0.5)) and torch.allclose(
        x[:, :, 2:-2, 2:-2], torch.tensor(4.5)
    )
    assert prepare.black == (-0.5,)


def test_resizing_keeps_plain_colours_and_directions():
    raw = np.zeros((1, 3, 64, 64), np.uint8)
    raw[:, 1] = 200
    raw[:, 2, :32] = 255  # the upper half
    x = Pictures((0.0,) * 3, (1.0,) * 3, size=84)(raw)
    assert x.shape == (1, 3, 84, 84) and torch.allclose(x[:, 1], torch.tensor(200 / 255))
    assert x[0, 2, :40].min() == 1 and x[0, 2, 44:].max() == 0


def test_what_was_read_is_left_as_it_is():
    raw = np.full((1, 1, 4, 4), 9, np.uint8)
    raw.flags.writeable = False
    Pictures((0.5,), (0.5,))(raw).zero_()
    assert (raw == 9).all()


def test_standardise_uses_the_training_statistics():
    raw = np.random.default_rng(0).integers(0, 256, (50, 3, 8, 8), np.uint8)
    x = standardise(raw)(raw)
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    table = np.array([[1.0, 5.0]])
    assert standardise(table)(table).tolist() == [[1.0, 5.0]]


def reference(x: torch.Tensor, top: int, left: int, mirror: bool, padding: int, fill: float) -> torch.Tensor:
    padded = torch.nn.functional.pad(x, [padding] * 4, value=fill)
    cropped = padded[:, top : top + x.shape[1], left : left + x.shape[2]]
    return cropped.flip(-1) if mirror else cropped


def test_every_crop_is_one_of_the_possible_ones_and_all_come():
    x = torch.arange(1.0, 21.0).view(1, 1, 4, 5)
    seen = set()
    for key in range(400):
        y = CropAndFlip(1, (-7.0,))(x, torch.tensor([key]))[0]
        matches = [
            (top, left, mirror)
            for top in range(3)
            for left in range(3)
            for mirror in (False, True)
            if torch.equal(y, reference(x[0], top, left, mirror, 1, -7.0))
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 18


def test_a_sample_is_changed_by_its_key_alone():
    x, keys = torch.randn(6, 3, 8, 8), torch.arange(6) * 1000003
    augment = CropAndFlip(4, (0.1, 0.2, 0.3))
    whole = augment(x, keys)
    assert torch.equal(whole[2:4], augment(x[2:4], keys[2:4]))
    assert torch.equal(whole.flip(0), augment(x.flip(0), keys.flip(0)))
    assert whole.dtype == x.dtype and augment(x.double(), keys).dtype == torch.float64


def test_each_channel_has_its_own_fill():
    x = torch.zeros(64, 2, 4, 4)
    y = CropAndFlip(4, (1.0, 2.0))(x, torch.arange(64))
    assert set(y[:, 0].unique().tolist()) == {0.0, 1.0} and set(y[:, 1].unique().tolist()) == {0.0, 2.0}
