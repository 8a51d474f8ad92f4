"""vramx.predict at levels: each as it runs, with what its codec keeps, as rows, text and JSON."""

from __future__ import annotations

import json

import pytest
import torch
from plan_tools import Stack, rows
from predict_tools import measured_bytes, peak, training
from torch import Tensor, nn

import vramx
from vramx.compression.codec.codec import bytes_of
from vramx.compression.config import Format
from vramx.errors import InvalidValueError
from vramx.planning.meters import HostMeter
from vramx.planning.storages import Watch


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def test_a_level_keeps_what_its_codec_says() -> None:
    model, x = nn.Sequential(*(Wide() for _ in range(4))), torch.zeros(8192, 64)
    kept = []

    def step() -> None:
        kept.append(model(x))

    # After forward; of a level with none of the temporaries of the last block.
    prediction = vramx.predict(step, levels=("left", "int8", "int4"), steps=1)
    exact = prediction.peak_bytes(level="left")
    for level, bits in (("int8", 8), ("int4", 4)):
        # Of a block gelu keeps its input and down its own; up keeps the block's input.
        packed = bytes_of(8192 * 1024, Format(bits)) * 2 + bytes_of(8192 * 64, Format(bits))
        saved = 4 * ((8192 * 1024 * 2 + 8192 * 64) * 4 - packed)
        largest = 2 * 8192 * 1024 * 4  # the temporaries of a block while they are packed
        assert abs(exact - prediction.peak_bytes(level=level) - saved) <= largest


def layers() -> nn.Module:
    made = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3))
    return nn.Sequential(*made)


@pytest.mark.parametrize(
    "level", ["left", "keep", "int8", "int4", "recompute_mlp", "recompute_all"]
)
def test_levels_of_known_blocks_are_predicted_as_they_run(level: str) -> None:
    model, x = layers(), torch.zeros(8, 32, 64)

    def forward(model: nn.Module) -> Tensor:
        return model(x).sum()

    options = {"levels": (level,), "device": "cpu", "policies": "live", "steps": 1}
    predicted = vramx.predict(forward, model, **options).peak_bytes()
    vramx.optimize(model, level)
    losses: list[Tensor] = []
    real = measured_bytes(lambda: losses.append(forward(model)), model, x, steps=1)
    assert predicted == real
    assert losses[0].requires_grad


@pytest.mark.parametrize("level", ["int8", "int4"])
def test_noise_is_drawn_on_the_host_as_in_a_real_step(level: str) -> None:
    model, x = nn.Sequential(*(Wide() for _ in range(2))), torch.zeros(512, 64)

    def step() -> None:
        with vramx.compress(level, min_bytes=0, rounding="stochastic"):
            loss = model(x).sum()
        loss.backward()

    assert peak(step, device="cpu", steps=1) == measured_bytes(step, model, x, steps=1)


@pytest.mark.slow
def test_what_operators_take_within_is_counted_on_the_host() -> None:
    model, x = layers(), torch.zeros(8, 32, 64)
    vramx.optimize(model, "int8")
    step, outside = training(model, x), HostMeter(model, [x])
    predicted = peak(step, device="cpu")
    assert predicted == measured_bytes(step, model, x, steps=1)
    with Watch(outside._counted):  # of operators of vramx it sees results alone
        step()
    assert predicted > outside.peak_bytes()


def test_a_level_that_no_block_has_is_a_row_that_says_so() -> None:
    prediction = vramx.predict(Stack(2), rows(64), levels=("left", "keep"))
    assert prediction.row("left").why_not is None
    assert "level 'keep'" in str(prediction)
    with pytest.raises(InvalidValueError, match="level 'keep' has no prediction"):
        prediction.peak_bytes(level="keep")


def test_one_word_is_a_level() -> None:
    prediction = vramx.predict(Stack(1), rows(64), levels="left", policies="live")
    assert [row.level for row in prediction.rows] == ["left"]


def test_the_text_and_the_json_have_every_row() -> None:
    prediction = vramx.predict(Stack(2), rows(64), levels=("left", "int8"), policies="live")
    assert str(prediction).splitlines()[0].split()[:2] == ["level", "live"]
    found = json.loads(prediction.to_json())
    assert [row["level"] for row in found["rows"]] == ["left", "int8"]
    assert found["rows"][0]["peak_bytes"] == {"live": prediction.peak_bytes()}
