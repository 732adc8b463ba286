"""Where a port parts from the kit's recording, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from on_the_kit import KIT, recording
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from vit_ports.compare import compare_folders, compare_recordings
from vit_ports.conventions import Convention
from vit_ports.format import sampled
from vit_ports.verdict import sentences

COUNT = 10  # pictures of the kit


@pytest.fixture
def reference():
    return recording()


def changed(reference, **changes):
    """The stages of a right port, in which some are changed: ``block_0=lambda numbers: ...``."""
    port = []
    for own in reference.stages:
        stages = dict(own)
        for stage, change in changes.items():
            stages[stage] = change(own[stage])
        port.append(stages)
    return port


# The rule.


def of_token(number, factor):
    def change(x):
        x = x.copy()
        x[number % len(x)] *= factor
        return x

    return change


def of_channel(number, factor):
    return lambda x: of_token(number, factor)(x.T).T


SHOWN = {
    "grid": lambda grid: grid + [1, 0],
    "pixels, all by half a grey level": lambda x: x + 1 / 255,
    "patch_embedding, all": lambda x: 1.001 * x,
    "position_embedding, one token": of_token(3, 1.001),
    "block_0, one channel": of_channel(7, 1.001),
    "norm, one token": of_token(3, 1.001),
    "pooled, one": of_token(5, 1.01),
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_difference_is_seen_at_its_stage_wherever_it_is(case, reference):
    stage = case.partition(",")[0]
    port = changed(reference, **{stage: SHOWN[case]})
    first = compare_recordings(reference, port).first
    assert first.stage == stage
    assert len(first.parting) == COUNT


@pytest.mark.parametrize("change", [of_token(3, 1.001), lambda x: 1.001 * x])
def test_an_outlier_hides_nothing(change, reference):
    def with_outlier(x):
        return x + 300.0 * (np.arange(32) == 9)

    outlying = replace(reference, stages=changed(reference, block_1=with_outlier))
    port = changed(reference, block_1=lambda x: with_outlier(change(x)))
    assert compare_recordings(outlying, port).first.stage == "block_1"
    assert compare_recordings(outlying, outlying.stages).first is None


@pytest.mark.parametrize(("part_of_limit", "stage"), [(0.8, "block_0"), (0.5, "block_1")])
def test_a_fault_that_grows_is_named_where_it_begins(part_of_limit, stage, reference):
    limit = reference.limits["block_0"]["float32"]["token"]
    port = changed(
        reference,
        block_0=lambda x: x * (1 + part_of_limit * limit),
        block_1=lambda x: x * (1 + 10 * limit),
    )
    assert compare_recordings(reference, port).first.stage == stage


@pytest.mark.parametrize("stage", ["pixels", "block_0", "pooled"])
def test_a_port_with_nan_parts_and_has_no_known_reason(stage, reference):
    """A folder with it is refused; a tower in the same process may give it."""
    port = changed(reference, **{stage: lambda x: x * np.nan})
    found = compare_recordings(reference, port)
    assert found.first.stage == stage
    assert not found.reason.known


def test_who_reads_the_pictures_may_differ_later_as_much_as_its_pixels_do(reference):
    moved = {"patch_embedding": lambda x: 1.001 * x}
    assert compare_recordings(reference, changed(reference, **moved)).first
    noise = np.random.default_rng(0)
    moved["pixels"] = lambda x: x + 2 / 255 * noise.integers(-1, 2, x.shape)
    port = changed(reference, **moved)
    for own in port:
        own["position_embedding"] = own["position_embedding"] + 0.001 * own["patch_embedding"]
    found = compare_recordings(reference, port)
    assert found.first is None
    right, wider = sentences(found)
    assert right.startswith("equal within what its own pixels move, on 10 pictures")
    assert wider.startswith("its own pixels differ by up to 1 grey levels, so the limits are wider")

    # Where a stage parts for another reason, no precision is blamed for what the pixels move.
    for own in port:
        own["block_1"] = 2 * own["block_1"]
    found = compare_recordings(reference, port)
    assert found.first.stage == "block_1"
    _, why, wider = sentences(found)
    assert "--precision" not in why and "compare again" in wider


# Reasons.


def with_mistake(reference, *pictures):
    """A recording with one mistake, which doubles block_0 in these pictures; and a port with it."""
    port = changed(reference)
    numbers = {}
    for picture in pictures:
        doubled = 2 * port[picture]["block_0"]
        port[picture]["block_0"] = doubled
        numbers[f"mine/{picture:03}.block_0"] = sampled(doubled)
    mistake = {"name": "mine", "words": "doubled", "stage": "block_0", "pictures": pictures}
    about = {**reference.about, "mistakes": [mistake]}
    return replace(reference, about=about, mistakes=numbers), port


def test_a_mistake_is_the_reason_only_if_it_explains_every_picture(reference):
    recording, port = with_mistake(reference, 4, 7)
    reason = compare_recordings(recording, port).reason
    assert reason.words == "doubled"
    assert reason.pictures == (4, 7)
    # Where it should show there are right or other numbers; where it should not, wrong ones.
    for picture, factor in ((7, 0.5), (7, 1.5), (0, 2)):
        other = [dict(own) for own in port]
        other[picture]["block_0"] = factor * port[picture]["block_0"]
        assert not compare_recordings(recording, other).reason.known


def test_a_convention_is_named_if_it_holds_for_every_picture(reference):
    convention = Convention(antialias=False, outside="zeros", transposed="table")
    port = changed(reference)
    for own in port:
        size = tuple(own["grid"].astype(int))
        tokens = convention.tokens(np.float64(reference.table), [(1, *size)])
        own["position_embedding"] = own["patch_embedding"] + tokens
    found = compare_recordings(reference, port)
    assert found.reason.words == f"the table is resampled otherwise: {convention.words()}"
    assert found.reason.pictures == found.first.parting
    port[3]["position_embedding"] = 1.1 * port[3]["position_embedding"]
    assert not compare_recordings(reference, port).reason.known


UNKNOWN = {
    "every number is 1.37 times the reference's": lambda x: 1.37 * x,
    f"in picture 000 1 of {2 * 22} tokens differ (first: 5)": of_token(5, 2),
    "in picture 000 1 of 32 channels differ (first: 7)": of_channel(7, 2),
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_which_numbers_differ_is_said_where_no_mistake_is_known(words, reference):
    found = compare_recordings(reference, changed(reference, block_1=UNKNOWN[words]))
    assert not found.reason.known and words in found.reason.words
    assert not any("likely reason" in said for said in sentences(found))


# The forms in which a port may write, and what it may leave out.


def with_axes(reference, folder):
    """A .npy file for each array, with an axis for the batch, and for the probe."""
    for number, own in enumerate(reference.stages):
        for stage, numbers in own.items():
            axes = (0, 1) if stage == "pooled" else 0
            numbers = np.expand_dims(numbers, axes).astype(">f4")
            np.save(folder / f"{number:03}.{stage}.npy", numbers)


def padded_batch(reference, folder):
    """One batch, of which padding is not a number."""
    arrays = {}
    for stage in reference.order:
        every = [torch.from_numpy(own[stage]) for own in reference.stages]
        arrays[stage] = pad_sequence(every, batch_first=True, padding_value=torch.nan)
    save_file(arrays, folder / "stages.safetensors")


@pytest.mark.parametrize("write", [with_axes, padded_batch])
def test_a_right_port_is_equal_in_each_form(write, reference, tmp_path):
    write(reference, tmp_path)
    found = compare_folders(KIT, tmp_path)
    assert found.first is None and found.reason is None
    assert found.missing == found.not_written == []
    assert [row.compared for row in found.rows] == [COUNT] * len(reference.order)


def test_an_unknown_precision_is_named():
    with pytest.raises(ValueError, match="precision must be one of float32, tf32, float16, bfloat"):
        compare_folders(KIT, KIT, "fp8")
