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


def changed(reference, last="pooled", **changes):
    """A right port's stages up to a last one, some changed: ``block_0=lambda numbers: ...``."""
    port = []
    written = reference.order[: reference.order.index(last) + 1]
    for own in reference.stages:
        stages = {stage: own[stage] for stage in written}
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


@pytest.mark.parametrize(("of", "measure"), [(of_token, "token"), (of_channel, "channel")])
@pytest.mark.parametrize(("size", "is_seen"), [(0.1, True), (1e-3, False)])
def test_a_mistake_near_zero_is_seen_and_rounding_at_zero_is_none(
    of, measure, size, is_seen, reference
):
    off = 3 * reference.limits["block_1"]["float32"][measure]
    small = replace(reference, stages=changed(reference, block_1=of(3, size)))
    port = changed(small, block_1=of(3, 1 + off))
    first = compare_recordings(small, port).first
    assert (first is not None and first.stage == "block_1") == is_seen


@pytest.mark.parametrize(
    ("first", "second", "third", "stage"),
    [
        (0.8, 0.9, 2, "block_0"),
        (0.5, 0.9, 2, "block_1"),
        # A stage that rounds much, before others that round less; and what is far beyond what was before.
        (0.9, 0.7, 0.6, None),
        (0.9, 0.8, 2, "block_1"),
        (0.8, 0.9, 3, "norm"),
    ],
)
def test_a_fault_that_grows_is_named_where_it_begins(first, second, third, stage, reference):
    limit = reference.limits["block_0"]["float32"]["token"]
    port = changed(
        reference,
        block_0=lambda x: x * (1 + first * limit),
        block_1=lambda x: x * (1 + second * limit),
        norm=lambda x: x * (1 + third * limit),
    )
    found = compare_recordings(reference, port)
    if stage is None:
        assert found.first is None
        return
    assert found.first.stage == stage
    whole = reference.limits[stage]["float32"].values()
    assert found.first.limit in whole and "the recording's limit" in sentences(found)[0]


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
    port = changed(reference, "block_0")
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
    port = changed(reference, "position_embedding")
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
    f"in picture 000 1 of {2 * 22} tokens differ (first: 5)": of_token(5, 2),
    "in picture 000 1 of 32 channels differ (first: 7)": of_channel(7, 2),
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_which_numbers_differ_is_said_where_no_mistake_is_known(words, reference):
    found = compare_recordings(reference, changed(reference, "block_1", block_1=UNKNOWN[words]))
    assert not found.reason.known and words in found.reason.words
    assert not any("likely reason" in said for said in sentences(found))


def test_a_mistake_in_two_of_three_pictures_is_no_reason(reference):
    recording, port = with_mistake(reference, 4, 7, 8)
    assert compare_recordings(recording, port).reason.known
    del recording.mistakes["mine/008.block_0"]
    assert not compare_recordings(recording, port).reason.known


def test_a_mistake_of_a_later_stage_is_no_reason(reference):
    """The first stage parts for another reason; the mistake is at one that was not written."""
    recording, port = with_mistake(reference, 4, 7, 8)
    numbers = {"mine/000.pooled": 2 * reference.stages[0]["pooled"]}
    about = {**recording.about, "mistakes_tried": 1}
    about["mistakes"] = [{**about["mistakes"][0], "pictures": [0]}]
    recording = replace(recording, about=about, mistakes=numbers)
    port = changed(recording, pooled=lambda x: 2 * x, patch_embedding=of_token(3, 2))
    written = [{stage: own[stage] for stage in ("patch_embedding", "pooled")} for own in port[:1]]
    assert not compare_recordings(recording, written).reason.known
    del written[0]["patch_embedding"]
    assert compare_recordings(recording, written).reason.words == "doubled"


def test_equal_later_stages_tell_that_another_thing_was_written(reference):
    """As transformers' hidden_states, which begin with the position embedding; and a bias too few."""
    port = changed(reference)
    for own in port:
        own["block_1"] = own["block_0"]
        own["block_0"] = own["position_embedding"]
        own["patch_embedding"] = own["patch_embedding"] + np.arange(32)
    words = "every later stage is equal: the port is right, but wrote something else as "
    said = compare_recordings(reference, port).reason.words
    assert said.startswith(f"{words}patch_embedding, block_0, block_1 (the same vector is added")
    for own, right in zip(port, reference.stages):
        own["patch_embedding"] = right["patch_embedding"]
    reason = compare_recordings(reference, port).reason
    assert reason.words == f"{words}block_0, block_1 (position_embedding's numbers)"
    # Too small, or in too few tokens: it may not be seen at the end.
    for change in (lambda x: 1.00005 * x, of_token(3, 2)):
        found = compare_recordings(reference, changed(reference, norm=change))
        assert found.first.stage == "norm" and "right" not in found.reason.words


@pytest.mark.parametrize("stage", ["position_embedding", "block_1", "pooled"])
def test_a_stage_that_is_off_by_little_after_equal_ones_is_told_no_precision(stage, reference):
    noise = np.random.default_rng(0)

    def moved(x):
        return x * (1 + 1e-3 * noise.standard_normal(x.shape))

    found = compare_recordings(reference, changed(reference, stage, **{stage: moved}))
    assert found.first.stage == stage
    assert "a small mistake, or this stage computes in less" in found.reason.words


def test_who_wrote_one_stage_alone_is_asked_for_its_pixels(reference):
    noise = np.random.default_rng(0)
    port = changed(reference, pooled=lambda x: x * (1 + 1e-3 * noise.standard_normal(x.shape)))
    alone = [{"pooled": own["pooled"]} for own in port]
    said = compare_recordings(reference, alone).reason.words
    assert said.startswith("if the port read the pictures itself, write grid and pixels, too: ")


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_recorded_pixels_that_were_rounded_are_not_the_ports_own(precision, reference):
    def rounded(x):
        return torch.tensor(x).to(getattr(torch, precision)).double().numpy()

    def of_another_resizer(x):
        levels = np.random.default_rng(0).integers(-1, 2, x.shape)
        return rounded(x + levels / 127.5)

    for own_pixels, change in ((False, rounded), (True, of_another_resizer)):
        found = compare_recordings(reference, changed(reference, pixels=change), precision)
        assert any("its own pixels" in said for said in sentences(found)) == own_pixels


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
    with pytest.raises(ValueError, match="precision must be one of float32, float16, tf32, bfloat"):
        compare_folders(KIT, KIT, "fp8")


def test_a_recording_of_before_has_no_limits_for_8_bits(reference):
    stages = []
    for stage in reference.about["stages"]:
        limits = {name: one for name, one in stage["limits"].items() if name != "int8"}
        stages.append({**stage, "limits": limits})
    older = replace(reference, about={**reference.about, "stages": stages})
    port = changed(reference, pooled=lambda x: 1.1 * x)
    assert compare_recordings(older, port).first.stage == "pooled"
    with pytest.raises(
        ValueError, match=r"no limits for int8, only for float32, .*: record it anew"
    ):
        compare_recordings(older, port, "int8")
