"""What happened to numbers is told, whatever the tower; what cannot be told so is not."""

import numpy as np
import pytest
from on_the_kit import recording

from vit_ports.compare import compare_recordings


def port_of(stage, change, count=10):
    """A right port up to a stage, which is changed in the first pictures."""
    kit = recording()
    written = kit.order[: kit.order.index(stage) + 1]
    port = []
    for number, own in enumerate(kit.stages):
        made = {name: own[name] for name in written}
        if number < count:
            made[stage] = change(own)
        port.append(made)
    return port


def of_colours(change):
    """Pixels of which the colours (N, p * p, 3) are changed."""
    return lambda own: change(own["pixels"].reshape(-1, 64, 3)).reshape(-1, 192)


def last_first(own):
    return own["block_0"][::-1]


TOLD = {
    "every number is 1.01 times the reference's": ("block_0", lambda own: 1.01 * own["block_0"]),
    "every number is zero": ("norm", lambda own: 0 * own["norm"]),
    "every number is -1 times the reference's": ("pooled", lambda own: -own["pooled"]),
    "block_0's numbers": ("norm", lambda own: own["block_0"]),
    "the colours are green, red, blue": ("pixels", of_colours(lambda x: x[..., [1, 0, 2]])),
    "each token's numbers are in another order: 3 at 0, 4 at 1": (
        "pixels",
        of_colours(lambda x: np.roll(x, -1, 1)),
    ),
    "each token's numbers are in another order: 31 at 0, 0 at 1": (
        "block_1",
        lambda own: np.roll(own["block_1"], 1, 1),
    ),
    "black is [-128.0, -128.0, -128.0] and white is [127.0, 127.0, 127.0]": (
        "pixels",
        lambda own: (own["pixels"] + 1) * 127.5 - 128,
    ),
    "black is [-0.5, -1.0, -1.0] and white is [0.5, 1.0, 1.0]": (
        "pixels",
        of_colours(lambda x: x * [0.5, 1, 1]),
    ),
    "another order (rows of all that part, one below the other): 43 at 0, 42 at 1": (
        "block_0",
        last_first,
    ),
    "what position_embedding adds to patch_embedding is 2 times the right one": (
        "position_embedding",
        lambda own: 2 * own["position_embedding"] - own["patch_embedding"],
    ),
    "the same vector is added everywhere": ("block_1", lambda own: own["block_1"] + np.arange(32)),
    "the same vector is added everywhere: perhaps": (
        "pooled",
        lambda own: own["pooled"] + np.arange(32),
    ),
}


@pytest.mark.parametrize("words", TOLD)
def test_what_happened_is_told(words):
    stage, change = TOLD[words]
    for precision in ("float32", "bfloat16"):
        found = compare_recordings(recording(), port_of(stage, change), precision)
        # Rounding hides what is small.
        if precision == "float32" or found.first:
            assert found.first.stage == stage
            assert words in found.reason.words
            assert not found.reason.known


def test_the_pooled_output_of_another_picture_is_told():
    kit = recording()
    pooled = [own["pooled"] for own in kit.stages]
    port = [{"pooled": one} for one in pooled[1:] + pooled[:1]]
    assert "pictures are in another order" in compare_recordings(kit, port).reason.words
    assert ": 1 at 0, 2 at 1" in compare_recordings(kit, port).reason.words


def test_what_is_fitted_needs_three_pictures():
    stage, change = TOLD["the same vector is added everywhere"]
    for count in (2, 3):
        said = compare_recordings(recording(), port_of(stage, change, count)).reason.words
        assert ("the same vector" in said) == (count == 3)


@pytest.mark.parametrize("stage", ["pixels", "patch_embedding", "block_0", "pooled"])
@pytest.mark.parametrize("size", [0.1, 3])
def test_of_noise_nothing_is_told(size, stage):
    noise = np.random.default_rng(1)

    def noisy(own):
        return own[stage] * (1 + size * noise.standard_normal(own[stage].shape))

    found = compare_recordings(recording(), port_of(stage, noisy))
    assert found.first.stage == stage
    assert found.reason.words.startswith(
        ("no known mistake", "as small as int8", "if the port read")
    )
