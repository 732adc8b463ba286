"""Where a port parts from a recording: transformers' tower with planted faults, the forms in which a
port may write its stages, and words for what no known mistake explains."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support import tiny_recordings
from timm_naflex_fast.commands.recordings.compare import compare_recordings
from timm_naflex_fast.commands.recordings.conventions import conventions
from timm_naflex_fast.commands.recordings.format import read_port, read_recording, write_recording
from timm_naflex_fast.commands.recordings.verdict import sentences

LENGTH = tiny_recordings.LENGTH
SIZE = tiny_recordings.PATCH


@pytest.fixture(scope="module")
def reference():
    _, recording = tiny_recordings.reference()
    return recording


@pytest.fixture(scope="module")
def pictures():
    return tiny_recordings.smooth_pictures()


# Faults, planted in transformers' tower, its processor or what the processor gives.


@pytest.fixture
def tower():
    """transformers' tower with the weights of the recording; each test may spoil its own."""
    pytest.importorskip("transformers")
    from timm_naflex_fast.commands.measure.pipelines import build_tower

    model, _ = tiny_recordings.reference()
    return build_tower(model, {})


def processor(**options):
    pytest.importorskip("torchvision")
    from transformers import Siglip2ImageProcessor

    return Siglip2ImageProcessor(patch_size=SIZE, max_num_patches=LENGTH, **options)


def with_changed(name, change):
    """A processor that changes one tensor of what it gives."""
    made = processor()

    def changed(**given):
        batch = made(**given)
        batch[name] = change(batch[name])
        return batch

    return changed


def right(tower):
    return processor()


def bicubic_pixels(tower):
    return processor(resample=3)


def swapped_coordinates(tower):
    return with_changed("spatial_shapes", lambda shapes: shapes[:, [1, 0]])


def channels_first(tower):
    def reordered(pixels):
        return pixels.view(-1, LENGTH, SIZE, SIZE, 3).permute(0, 1, 4, 2, 3).flatten(2)

    return with_changed("pixel_values", reordered)


def transposed_table(tower):
    table = core(tower).embeddings.position_embedding.weight
    table.data = table.data.view(6, 6, 32).transpose(0, 1).reshape(36, 32)


def no_mask(tower):
    forward = core(tower).encoder.forward

    def unmasked(*given, attention_mask=None, **more):
        return forward(*given, attention_mask=None, **more)

    core(tower).encoder.forward = unmasked


def one_block_changed(tower):
    with torch.no_grad():
        core(tower).encoder.layers[1].mlp.fc1.weight[3, 5] += 0.1


def product_under_autocast(tower):
    embeddings = core(tower).embeddings
    resize = embeddings.resize_positional_embeddings

    def in_bfloat16(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return resize(*args, **kwargs)

    embeddings.resize_positional_embeddings = in_bfloat16


def no_mask_in_the_pooling_head(tower):
    head = core(tower).head.forward
    core(tower).head.forward = lambda tokens, mask: head(tokens, None)


def core(tower):
    return getattr(tower, "vision_model", tower)


def stages_of_transformers(tower, processor, inputs, pictures):
    """What transformers' tower makes of inputs or, without them, of pictures."""
    from timm_naflex_fast.commands.measure.pipelines import stages_of, transformers_pipeline

    pipeline = transformers_pipeline(tower, processor)
    inputs = inputs or pipeline.read(pictures)
    return stages_of(inputs, pipeline.tower(inputs))


# Fault: the stage, how many of the pictures are beyond rounding there, and the reason.
BEFORE_THE_TOWER = {
    bicubic_pixels: ("pixels", 4, "pictures resized by bicubic"),
    swapped_coordinates: ("grid", 3, "the grid is written as (columns, rows)"),
    channels_first: ("pixels", 4, "a patch in the order (channel, y, x), not (y, x, channel)"),
}
IN_THE_TOWER = {
    transposed_table: ("position_embedding", 4, "the table is read transposed"),
    no_mask: ("block_0", 2, "padding is not masked in the blocks"),
    one_block_changed: ("block_1", 4, None),
    product_under_autocast: (
        "position_embedding",
        4,
        "the table is resized by one product in bfloat16, perhaps under autocast",
    ),
    no_mask_in_the_pooling_head: ("pooled", 2, "padding is not masked in the pooling"),
}


@pytest.mark.parametrize("fault", [*BEFORE_THE_TOWER, *IN_THE_TOWER], ids=lambda one: one.__name__)
def test_a_fault_in_transformers_is_named_at_its_stage(fault, tower, reference, pictures):
    from timm_naflex_fast.commands.measure.record import inputs_of

    inputs = None
    if fault in IN_THE_TOWER:
        inputs = inputs_of(reference.stages, LENGTH)
    made = fault(tower) or processor()
    ports = stages_of_transformers(tower, made, inputs, pictures)
    found = tiny_recordings.compared(reference, ports)
    stage, count, words = (BEFORE_THE_TOWER | IN_THE_TOWER)[fault]
    first, reason = found.first, found.reason
    assert (first.stage, reason.stage, len(first.parting)) == (stage, stage, count)
    assert reason.known == (words is not None)
    if words:
        assert reason.words == words
    else:
        assert "(no known mistake gives these numbers)" in reason.words


@pytest.mark.parametrize("begins_with", ["pictures", "pixels"])
def test_transformers_itself_parts_nowhere(begins_with, tower, reference, pictures):
    from timm_naflex_fast.commands.measure.record import inputs_of

    inputs = None
    if begins_with == "pixels":
        inputs = inputs_of(reference.stages, LENGTH)
    ports = stages_of_transformers(tower, processor(), inputs, pictures)
    assert tiny_recordings.compared(reference, ports).first is None


# The forms in which a port may write.


@pytest.fixture(scope="module")
def folder(reference, pictures, tmp_path_factory):
    """The recording as a folder."""
    out = tmp_path_factory.mktemp("recordings") / "reference"
    write_recording(reference, pictures, out)
    return out


def by_picture(reference):
    """A right port's arrays, by the names under which it writes them."""
    arrays = {}
    for number, stages in enumerate(reference.stages):
        for stage, numbers in stages.items():
            arrays[f"{number:03}.{stage}"] = torch.tensor(np.array(numbers))
    return arrays


def padded_batch(reference):
    """The same as one batch, of which padding is not a number."""
    arrays = {}
    for stage in reference.order:
        every = [torch.tensor(np.array(own[stage])) for own in reference.stages]
        if stage in ("grid", "pooled"):
            arrays[stage] = torch.stack(every)
        else:
            shape = (len(every), LENGTH + 4, every[0].shape[1])
            arrays[stage] = torch.full(shape, float("nan"))
            for number, one in enumerate(every):
                arrays[stage][number, : len(one)] = one
    return arrays


def compared(out, folder):
    """The comparison of a folder, after it was read."""
    read = read_recording(folder)
    return compare_recordings(read, read_port(out, read))


@pytest.mark.parametrize("form", [by_picture, padded_batch], ids=lambda form: form.__name__)
@pytest.mark.parametrize("precision", ["float64", "float32", "float16", "bfloat16"])
def test_a_right_port_is_equal_in_each_form(form, precision, reference, folder, tmp_path):
    dtype = getattr(torch, precision)
    arrays = {}
    for name, numbers in form(reference).items():
        is_grid = not numbers.is_floating_point()
        arrays[name] = numbers if is_grid else numbers.to(dtype).contiguous()
    save_file(arrays, tmp_path / "stages.safetensors")
    found = compared(tmp_path, folder)
    assert (found.first, found.reason, found.pictures) == (None, None, 4)
    assert found.precision == precision.replace("64", "32")


def test_files_of_numpy_are_read(reference, folder, tmp_path):
    for name, numbers in by_picture(reference).items():
        np.save(tmp_path / f"{name}.npy", numbers.numpy())
    found = compared(tmp_path, folder)
    assert (found.first, found.missing, found.pictures) == (None, [], 4)


def test_a_recording_is_equal_to_itself(folder):
    found = compared(folder, folder)
    assert {row.largest for row in found.rows} == {0.0}


def test_an_axis_for_the_batch_and_one_for_the_probe_are_taken_off(reference, folder, tmp_path):
    own = reference.stages[0]
    np.save(tmp_path / "000.block_0.npy", own["block_0"][None])
    np.save(tmp_path / "000.pooled.npy", own["pooled"][None, None])
    assert compared(tmp_path, folder).first is None


def test_what_a_port_did_not_write_is_said(reference, folder, tmp_path):
    np.save(tmp_path / "001.pooled.npy", reference.stages[1]["pooled"])
    found = compared(tmp_path, folder)
    assert found.missing == reference.order[:-1]
    assert found.pictures == 1
    said = sentences(found)
    assert said[0].startswith("equal within float32's rounding, on 1 pictures: pooled differs by 0")
    assert said[1].startswith("not written by the port, so not compared: grid, pixels, patch_emb")


# Words for what no known mistake explains.

UNKNOWN = {
    "every number is 1.37 times the reference's": lambda x: 1.37 * x,
    "in 1 of 36 tokens (first: 5)": lambda x: np.where(np.arange(36)[:, None] == 5, 2 * x, x),
    "in 1 of 32 channels (first: 7)": lambda x: np.where(np.arange(32) == 7, x + 1 + x**2, x),
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_the_kind_of_an_unknown_difference_is_said(words, reference):
    wrong = UNKNOWN[words](reference.stages[0]["block_1"])
    reason = tiny_recordings.compared(reference, [{"block_1": wrong}, {}, {}, {}]).reason
    assert not reason.known
    assert words in reason.words


def test_of_two_mistakes_at_one_stage_the_nearest_is_no_reason(reference):
    """Blue, green, red; and noise, which stands for a mistake that nobody knows."""
    ports = []
    noise = np.random.default_rng(0)
    for own in reference.stages:
        pixels = own["pixels"]
        reversed_colours = pixels.reshape(len(pixels), -1, 3)[..., ::-1].reshape(pixels.shape)
        ports.append({"pixels": reversed_colours + 0.05 * noise.standard_normal(pixels.shape)})
    reason = tiny_recordings.compared(reference, ports).reason
    assert not reason.known
    assert (
        "% of the difference (colours in the order blue, green, red), so something" in reason.words
    )


def test_a_later_stage_does_not_hide_the_second_of_two_mistakes(reference):
    """Bicubic; and blue, green, red, whose end is nearly that of both. There limits are wide."""
    entries = {one["name"]: one["picture"] for one in reference.about["mistakes"]}
    picture = entries["bgr"]
    assert entries["bicubic"] == picture
    pixels = reference.mistakes[f"bicubic/{picture:03}.pixels"]
    both = pixels.reshape(len(pixels), -1, 3)[..., ::-1].reshape(pixels.shape)
    ports = [{} for _ in reference.stages]
    ports[picture] = {"pixels": both, "pooled": reference.mistakes[f"bgr/{picture:03}.pooled"]}
    reason = tiny_recordings.compared(reference, ports).reason
    assert reason.stage == "pixels"
    assert not reason.known


def test_a_mistake_of_the_patch_kernel_is_known_at_the_patch_embedding_alone(reference):
    (picture,) = [
        one["picture"] for one in reference.about["mistakes"] if one["name"] == "kernel_cyx"
    ]
    ports = [{} for _ in reference.stages]
    mistaken = reference.mistakes[f"kernel_cyx/{picture:03}.patch_embedding"]
    ports[picture] = {"patch_embedding": mistaken}
    reason = tiny_recordings.compared(reference, ports).reason
    assert reason.known
    assert reason.words == "the patch kernel is laid out in the order (channel, y, x)"


def test_a_convention_is_named_and_no_other(reference):
    own = reference.stages[2]
    grid = [(1, *map(int, own["grid"]))]
    count = 0
    for convention in list(conventions(grid))[5::97]:
        tokens = convention.tokens(np.asarray(reference.table, np.float64), grid)
        port = {
            "patch_embedding": own["patch_embedding"],
            "position_embedding": own["patch_embedding"] + tokens,
        }
        reason = tiny_recordings.compared(reference, [{}, {}, port, {}]).reason
        if reason:
            named = reason.words.removeprefix("the table is resampled otherwise: ")
            assert reason.known
            if named != reason.words:
                found = [one for one in conventions(grid) if one.words() == named]
                same = found[0].tokens(np.asarray(reference.table, np.float64), grid)
                assert np.abs(same - tokens).max() <= 1e-6
                count += 1
    assert count >= 4
