"""Each known mistake is found in a port that makes it: at its stage, with its words.

The ports are written a second time, in NumPy (``tests/support/numpy_tower.py``).
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support import tiny_recordings
from tests.support.numpy_tower import (
    exact_gelu,
    hat,
    lanczos,
    quick_gelu,
    relu,
    resized,
    silu,
    weights_of_cells,
)
from timm_naflex_fast.recordings import mistakes
from timm_naflex_fast.recordings.conventions import conventions
from timm_naflex_fast.recordings.mistakes import mistakes_of

SIZE = tiny_recordings.PATCH


# Ports that read the pictures themselves, each with a mistake: from an RGB picture and the right
# grid to a grid and patches.


def cut(image, grid):
    """Colours (H, W, 3) as patches (h * w, p * p * 3)."""
    h, w = grid
    rows = []
    for y in range(h):
        for x in range(w):
            rows.append(image[y * SIZE : (y + 1) * SIZE, x * SIZE : (x + 1) * SIZE].ravel())
    return np.array(rows, np.float32)


def colours(picture, grid, resample=Image.Resampling.BILINEAR):
    """A resized picture (H, W, 3), from 0 to 255."""
    h, w = grid
    return np.asarray(picture.resize((w * SIZE, h * SIZE), resample), np.float32)


def read(picture, grid, change=lambda c: c / 127.5 - 1, **options):
    grid = tuple(map(int, grid))
    return grid, cut(change(colours(picture, grid, **options)), grid)


def imagenet(c):
    return (c / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)


def clip(c):
    return (c / 255 - (0.48145466, 0.4578275, 0.40821073)) / (0.26862954, 0.26130258, 0.27577711)


def gray(picture, grid):
    return read(picture.convert("L").convert("RGB"), grid)


def squeezed(picture, grid):
    return read(picture, (6, 6))


def width_first(picture, grid):
    _, patches = read(picture, grid)
    return tuple(grid[::-1]), patches


def turned(picture, grid, how):
    on_its_side = how in (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_270)
    return read(picture.transpose(how), grid[::-1] if on_its_side else grid)


def in_floating_point(picture, grid, **options):
    """Resized by PyTorch: without antialiasing, the filter is not widened."""
    h, w = map(int, grid)
    pixels = torch.tensor(np.array(picture, np.float64)).permute(2, 0, 1)[None]
    small = torch.nn.functional.interpolate(pixels, (h * SIZE, w * SIZE), **options)
    image = small[0].permute(1, 2, 0).numpy()
    return (h, w), cut(image / 127.5 - 1, (h, w))


def nearest_floor(picture, grid):
    h, w = map(int, grid)
    rows = np.arange(h * SIZE) * picture.height // (h * SIZE)
    columns = np.arange(w * SIZE) * picture.width // (w * SIZE)
    return (h, w), cut(np.array(picture)[rows][:, columns] / 127.5 - 1, (h, w))


def by(filter_name):
    return partial(read, resample=Image.Resampling[filter_name])


READERS = {
    "grid_width_first": width_first,
    "squeezed": squeezed,
    "bgr": partial(read, change=lambda c: c[..., ::-1] / 127.5 - 1),
    "from_0_to_1": partial(read, change=lambda c: c / 255),
    "from_0_to_255": partial(read, change=lambda c: c),
    "imagenet": partial(read, change=imagenet),
    "imagenet_bgr": partial(read, change=lambda c: imagenet(c[..., ::-1])),
    "clip": partial(read, change=clip),
    "gray": gray,
    "nearest": by("NEAREST"),
    "bilinear": by("BILINEAR"),
    "bilinear_not_antialiased": partial(in_floating_point, mode="bilinear"),
    "bicubic": by("BICUBIC"),
    "bicubic_not_antialiased": partial(in_floating_point, mode="bicubic"),
    "bicubic_float": partial(in_floating_point, mode="bicubic", antialias=True),
    "nearest_floor": nearest_floor,
    "lanczos": by("LANCZOS"),
    "box": by("BOX"),
    "hamming": by("HAMMING"),
    "upside_down": partial(turned, how=Image.Transpose.ROTATE_180),
    "mirrored": partial(turned, how=Image.Transpose.FLIP_LEFT_RIGHT),
    "flipped": partial(turned, how=Image.Transpose.FLIP_TOP_BOTTOM),
    "turned_left": partial(turned, how=Image.Transpose.ROTATE_90),
    "turned_right": partial(turned, how=Image.Transpose.ROTATE_270),
}


# Ports that begin with the reference's pixels, and hold the numbers of a patch otherwise.


def in_patches(axes):
    return lambda h, w, pixels: pixels.reshape(-1, SIZE, SIZE, 3).transpose(0, *axes)


ORDERS = {
    "patch_cyx": in_patches((3, 1, 2)),
    "patch_xyc": in_patches((2, 1, 3)),
    "patch_cxy": in_patches((3, 2, 1)),
    "tokens_by_column": lambda h, w, pixels: pixels.reshape(h, w, -1).swapaxes(0, 1),
}


# Patch kernels: from the right one (C, p, p, 3) to one that a port uses in its place.

KERNELS = {
    "kernel_cyx": lambda kernel: kernel.transpose(0, 3, 1, 2),
    "kernel_xyc": lambda kernel: kernel.transpose(0, 2, 1, 3),
    "kernel_cxy": lambda kernel: kernel.transpose(0, 3, 2, 1),
    "kernel_bgr": lambda kernel: kernel[..., ::-1],
    "kernel_mirrored": lambda kernel: kernel[:, :, ::-1],
    "kernel_flipped": lambda kernel: kernel[:, ::-1],
}


# Position embeddings: from a table (H, W, C), h and w to tokens.


def first_rows(table, h, w):
    rows = table.reshape(-1, table.shape[2])
    return rows[np.arange(h * w) % len(rows)]


def corner(table, h, w):
    return table[np.arange(h).clip(max=5)][:, np.arange(w).clip(max=5)].reshape(h * w, -1)


def transposed_table(table, h, w):
    return resized(table.swapaxes(0, 1), h, w)


def transposed_size(table, h, w):
    return resized(table, w, h)


def by_column(table, h, w):
    return resized(table, h, w).reshape(h, w, -1).swapaxes(0, 1).reshape(h * w, -1)


def rounded(numbers):
    return torch.tensor(numbers).bfloat16().double().numpy()


def product_in_bfloat16(table, h, w):
    rows = weights_of_cells(len(table), h, hat)
    columns = weights_of_cells(table.shape[1], w, hat)
    weights = rounded(np.kron(rows, columns))  # (h * w, H * W)
    return rounded(weights @ rounded(table).reshape(-1, table.shape[2]))


def by_torch(**options):
    """PyTorch's own resize of the table."""

    def tokens(table, h, w):
        pixels = torch.tensor(table).permute(2, 0, 1)[None]
        found = torch.nn.functional.interpolate(pixels, (h, w), **options)
        return found[0].permute(1, 2, 0).reshape(h * w, -1).numpy()

    return tokens


POSITIONS = {
    "position_left_out": lambda table, h, w: np.zeros((h * w, table.shape[2])),
    "position_twice": lambda table, h, w: 2 * resized(table, h, w),
    "table_first_rows": first_rows,
    "table_corner": corner,
    "table_transposed": transposed_table,
    "size_transposed": transposed_size,
    "positions_by_column": by_column,
    "table_in_bfloat16": lambda table, h, w: resized(rounded(table), h, w),
    "product_in_bfloat16": product_in_bfloat16,
    "table_bicubic": by_torch(mode="bicubic", antialias=True),
    "table_not_antialiased": by_torch(mode="bilinear"),
    "table_bicubic_not_antialiased": by_torch(mode="bicubic"),
    "table_area": by_torch(mode="area"),
    "table_lanczos": partial(resized, kernel=lanczos),
    "table_align_corners": by_torch(mode="bilinear", align_corners=True),
}


# Towers: choices of ``numpy_tower.Port``.

TOWERS = {
    "padding_not_masked": dict(masks=False),
    "exact_gelu": dict(act=exact_gelu),
    "quick_gelu": dict(act=quick_gelu),
    "relu": dict(act=relu),
    "silu": dict(act=silu),
    "eps_1e-5": dict(eps=1e-5),
    "eps_1e-12": dict(eps=1e-12),
    "heads_halved": dict(block_heads=0.5),
    "heads_doubled": dict(block_heads=2),
    "no_scale": dict(scale=lambda size: 1.0),
    "scale_twice": dict(scale=lambda size: 1 / size),
    "scale_of_width": dict(scale=lambda size: (4 * size) ** -0.5),
    "order_k_q_v": dict(order=(1, 0, 2)),
    "order_v_k_q": dict(order=(2, 1, 0)),
    "order_q_v_k": dict(order=(0, 2, 1)),
    "order_k_v_q": dict(order=(1, 2, 0)),
    "order_v_q_k": dict(order=(2, 0, 1)),
    "interleaved": dict(interleaved=True),
    "no_qkv_bias": dict(without=("q", "k", "v")),
    "no_q_bias": dict(without=("q",)),
    "no_v_bias": dict(without=("v",)),
    "no_out_bias": dict(without=("proj",)),
    "no_fc1_bias": dict(without=("fc1",)),
    "no_fc2_bias": dict(without=("fc2",)),
    "post_norm": dict(block="post_norm"),
    "swapped_norms": dict(block="swapped_norms"),
    "no_norms": dict(block="no_norms"),
    "no_attention_residual": dict(block="no_attention_residual"),
    "no_mlp_residual": dict(block="no_mlp_residual"),
    "no_attention": dict(block="no_attention"),
    "no_mlp": dict(block="no_mlp"),
    "no_first_norm": dict(block="no_first_norm"),
    "no_second_norm": dict(block="no_second_norm"),
    "rms_norm": dict(rms=True),
    "one_head": dict(block_heads=1 / 4),
    "no_out_projection": dict(out_projection=False),
    "parallel": dict(block="parallel"),
    "causal": dict(causal=True),
    "blocks_reversed": dict(blocks=(2, 1, 0)),
    "block_0_left_out": dict(blocks=(None, 1, 2)),
    "block_1_left_out": dict(blocks=(0, None, 2)),
    "block_2_left_out": dict(blocks=(0, 1, None)),
    "max_pooled": dict(head={"largest": True}),
    "pooling_heads_halved": dict(head={"heads": 0.5}),
    "pooling_heads_doubled": dict(head={"heads": 2}),
    "pooling_scale_twice": dict(head={"scale": lambda size: 1 / size}),
    "pooling_exact_gelu": dict(head={"act": exact_gelu}),
    "pooling_quick_gelu": dict(head={"act": quick_gelu}),
    "pooling_no_qkv_bias": dict(head={"without": ("q", "kv")}),
    "pooling_no_q_bias": dict(head={"without": ("q",)}),
    "pooling_no_out_bias": dict(head={"without": ("proj",)}),
    "pooling_no_mlp_bias": dict(head={"without": ("fc1", "fc2")}),
    "no_last_norm": dict(last_norm=False),
    "mean_pooled": dict(head={"mean": "valid"}),
    "mean_of_padding_too": dict(head={"mean": "all"}),
    "first_token": dict(head={"first": True}),
    "pooling_not_masked": dict(head={"unmasked": True}),
    "no_pooling_residual": dict(head={"no_residual": True}),
    "no_pooling_mlp": dict(head={"no_mlp": True}),
    "no_pooling_norm": dict(head={"no_norm": True}),
    "probe_not_projected": dict(head={"probe": True}),
    "no_pooling_projection": dict(head={"no_projection": True}),
    "pooling_k_v": dict(head={"k_v": True}),
    "pooling_no_scale": dict(head={"scale": lambda size: 1.0}),
    "pooling_one_head": dict(head={"heads": 1 / 4}),
    "normalized": dict(head={"normalized": True}),
}
# Where padding shows, what it holds does too, and how much of it there is.
for name in ("padding_not_masked", "mean_of_padding_too", "pooling_not_masked"):
    TOWERS[f"{name}_in_transformers"] = dict(TOWERS[name], padded_as_in="transformers")
    TOWERS[f"{name}_twice"] = dict(TOWERS[name], length=2 * tiny_recordings.LENGTH)
NOT_SHOWN = {
    # What the reference itself does.
    "bilinear",
    "tanh_gelu",
    # No picture of the tiny recording has a grid of one column; that of a test below has.
    "interpolate_unbatched",
    # What the head's LayerNorm takes is too large there; a test below makes it small.
    "pooling_eps_1e-5",
}


@pytest.fixture(scope="module")
def model():
    model, _ = tiny_recordings.reference()
    return model


@pytest.fixture(scope="module")
def reference():
    _, recording = tiny_recordings.reference()
    return recording


@pytest.fixture(scope="module")
def pictures():
    return tiny_recordings.smooth_pictures()


@pytest.fixture(scope="module")
def make(model, reference, pictures):
    """The function that makes the stages of a port with this mistake, for each picture."""

    def make(name):
        right = tiny_recordings.port_of(model)
        if name in READERS:
            made = []
            for picture, own in zip(pictures, reference.stages):
                made.append(right(*READERS[name](picture, own["grid"])))
            return made
        if name in ORDERS:
            made = []
            for own in reference.stages:
                pixels = ORDERS[name](*own["grid"], own["pixels"]).reshape(own["pixels"].shape)
                made.append(right(own["grid"], pixels))
            return made
        choices = TOWERS.get(name)
        if name in KERNELS:
            choices = dict(kernel=KERNELS[name])
        if name in POSITIONS:
            choices = dict(position=POSITIONS[name])
        ports = tiny_recordings.run_port(tiny_recordings.port_of(model, **choices), reference)
        for port in ports:
            del port["pixels"]
        return ports

    return make


def entry_of(reference, name):
    """What recording.json says of a mistake."""
    (found,) = [one for one in reference.about["mistakes"] if one["name"] == name]
    return found


def words_of(reference, name, stage, picture):
    """The words of a mistake, and of those that give the same numbers at a stage."""
    key = f"{picture:03}.{stage}"
    right = reference.mistakes[f"{name}/{key}"]
    words = set()
    for one in reference.about["mistakes"]:
        numbers = reference.mistakes.get(f"{one['name']}/{key}")
        if numbers is None or numbers.shape != right.shape:
            continue
        if np.abs(numbers - right).max() <= 1e-4 * np.abs(right).max():
            words.add(one["words"])
    return words


ALL = [*READERS, *ORDERS, *KERNELS, *POSITIONS, *TOWERS]


def test_each_mistake_of_the_list_has_a_port_here(model):
    every = {mistake.name for mistake in mistakes_of(model)}
    assert every == {*ALL, *NOT_SHOWN}


def test_each_mistake_shows_in_the_recording(reference):
    assert {one["name"] for one in reference.about["mistakes"]} == {*ALL} - NOT_SHOWN


@pytest.mark.parametrize("name", [name for name in ALL if name not in NOT_SHOWN])
def test_a_port_with_a_mistake_is_told_so(name, make, reference):
    found = tiny_recordings.compared(reference, make(name))
    reason = found.reason
    entry = entry_of(reference, name)
    assert found.first.stage == reason.stage == entry["stage"]
    assert reason.known, reason.words
    assert reason.words in words_of(reference, name, reason.stage, reason.picture)


@pytest.mark.parametrize("name", [*ORDERS, *KERNELS, *POSITIONS, *TOWERS])
def test_the_pooled_output_alone_is_enough(name, make, reference):
    ports = [{"pooled": port["pooled"]} for port in make(name)]
    reason = tiny_recordings.compared(reference, ports).reason
    picture = entry_of(reference, name)["picture"]
    assert reason.stage == "pooled"
    assert reason.known, reason.words
    assert reason.words in words_of(reference, name, "pooled", picture)


def keep_mistakes(monkeypatch, names):
    """No others are tried."""
    for where, entries in mistakes.MISTAKES.items():
        kept = [entry for entry in entries if entry[0] in names]
        monkeypatch.setitem(mistakes.MISTAKES, where, kept)


def test_one_entry_adds_a_mistake(monkeypatch, pictures):
    keep_mistakes(monkeypatch, set())
    entry = ("doubled", "the last LayerNorm is doubled", lambda norm, run, x, mask: 2 * run(x))
    monkeypatch.setitem(mistakes.MISTAKES, "norm", [entry])
    recording = tiny_recordings.recording_of(tiny_recordings.tiny_model(depth=1), pictures[:1])
    (own,) = recording.stages
    reason = tiny_recordings.compared(recording, [own | {"norm": 2 * own["norm"]}]).reason
    assert (reason.stage, reason.words) == ("norm", "the last LayerNorm is doubled")


def test_the_eps_of_the_head_is_told_where_its_tokens_are_small(monkeypatch, pictures):
    keep_mistakes(monkeypatch, {"eps_1e-5", "pooling_eps_1e-5"})
    model = tiny_recordings.tiny_model(depth=1)
    for parameter in model.attn_pool.proj.parameters():
        parameter.data *= 1e-3
    recording = tiny_recordings.recording_of(model, pictures[:1])
    port = tiny_recordings.port_of(model, head={"eps": 1e-5})
    reason = tiny_recordings.compared(recording, tiny_recordings.run_port(port, recording)).reason
    assert reason.stage == "pooled"
    assert reason.words == "the head's LayerNorm has eps 1e-5, not 1e-6"


def test_pytorchs_fault_at_a_grid_of_one_column_is_told(monkeypatch, model):
    def unbatched(table, h, w):
        of_float32 = by_torch(mode="bilinear", antialias=True)
        return of_float32(table.astype(np.float32), h, w)

    table = tiny_recordings.port_of(model).weights["embeds.pos_embed"][0]
    if np.allclose(unbatched(table, 20, 1), resized(table, 20, 1), atol=1e-5):
        pytest.skip("this PyTorch is right there")
    keep_mistakes(monkeypatch, {"interpolate_unbatched"})
    tall = tiny_recordings.smooth_pictures([(480, 16)])
    recording = tiny_recordings.recording_of(model, tall)
    port = tiny_recordings.port_of(model, position=unbatched)
    reason = tiny_recordings.compared(recording, tiny_recordings.run_port(port, recording)).reason
    assert reason.known and reason.stage == "position_embedding"
    assert reason.words.startswith("F.interpolate of an unbatched table is wrong")


def test_what_a_reference_does_itself_is_told_to_a_port_of_another(monkeypatch, pictures):
    keep_mistakes(monkeypatch, {"bilinear", "tanh_gelu"})
    model = tiny_recordings.tiny_model(depth=1, act_layer="gelu")
    recording = tiny_recordings.recording_of(model, pictures[:1], "bicubic")
    (own,) = recording.stages
    port = tiny_recordings.port_of(model)
    pixels = tiny_recordings.compared(recording, [port(*read(pictures[0], own["grid"]))]).reason
    block = tiny_recordings.compared(recording, tiny_recordings.run_port(port, recording)).reason
    assert (pixels.stage, pixels.words) == ("pixels", "pictures resized by bilinear")
    assert block.stage == "block_0"
    assert block.words == "GELU's approximation by tanh, not the exact one"


@pytest.mark.parametrize("padded_as_in", ["timm", "transformers"])
@pytest.mark.parametrize(
    ("choices", "stage", "words"),
    [
        (dict(masks=False), "block_0", "padding is not masked in the blocks"),
        (dict(head={"unmasked": True}), "pooled", "padding is not masked in the pooling"),
        (dict(head={"mean": "all"}), "pooled", "the mean of all tokens, padding too"),
    ],
)
def test_padding_is_that_of_the_most_patches(
    choices, stage, words, padded_as_in, model, pictures, padded
):
    port = tiny_recordings.port_of(model, padded_as_in=padded_as_in, **choices)
    reason = tiny_recordings.compared(padded, tiny_recordings.run_port(port, padded)).reason
    assert (reason.stage, reason.words) == (stage, words)


@pytest.fixture(scope="module")
def padded(model, pictures):
    """A recording of pictures none of which fills all patches; of mistakes about padding."""
    about_padding = {mistake.name for mistake in mistakes_of(model) if mistake.padding}
    with pytest.MonkeyPatch.context() as patch:
        keep_mistakes(patch, about_padding)
        return tiny_recordings.recording_of(model, pictures[1::2])


def test_without_padding_no_mistake_about_it_is_recorded(monkeypatch, model):
    keep_mistakes(monkeypatch, {"mean_of_padding_too", "mean_pooled"})
    full = tiny_recordings.smooth_pictures([(160, 160)])
    recording = tiny_recordings.recording_of(model, full)
    assert len(recording.stages[0]["pixels"]) == tiny_recordings.LENGTH
    names = {one["name"] for one in recording.about["mistakes"]}
    assert "mean_pooled" in names
    assert not [name for name in names if name.startswith("mean_of_padding_too")]


def test_three_mistakes_are_named_one_after_the_other(model, reference, pictures):
    def port(reader, **choices):
        made = tiny_recordings.port_of(model, **choices)
        return [made(*reader(one, own["grid"])) for one, own in zip(pictures, reference.stages)]

    bgr, right = READERS["bgr"], READERS["bilinear"]
    table = dict(position=POSITIONS["table_transposed"])
    norms = dict(block="swapped_norms")
    walk = [port(bgr, **table, **norms), port(right, **table, **norms), port(right, **norms)]
    told = []
    for ports in [*walk, port(right)]:
        reason = tiny_recordings.compared(reference, ports).reason
        told.append(reason and (reason.stage, reason.words))
    assert told == [
        ("pixels", "colours in the order blue, green, red"),
        ("position_embedding", "the table is read transposed"),
        ("block_0", "the two LayerNorms of a block are exchanged"),
        None,
    ]


def some_conventions(grid, number=12):
    """Conventions of ``identify``, from all over the list."""
    every = [one for one in conventions([(1, *grid)]) if one.merge == 1]
    return every[:: max(1, len(every) // number)]


def test_each_convention_of_identify_is_told_at_the_position_embedding(model, reference):
    unknown = replace(reference, mistakes={})  # none recorded
    own = reference.stages[2]
    grid = tuple(map(int, own["grid"]))
    table = np.float64(reference.table)

    for convention in some_conventions(grid):
        position = convention.tokens(table, [(1, *grid)])
        port = {"patch_embedding": own["patch_embedding"]}
        port["position_embedding"] = np.float32(own["patch_embedding"] + position)
        reason = tiny_recordings.compared(unknown, [{}, {}, port, {}]).reason
        if reason is None:
            continue  # the right one, or one that gives the same here
        assert reason.known, convention
        assert reason.words.startswith("the table is resampled otherwise: ")


# Ports without a mistake.


@pytest.fixture(scope="module")
def timms(model, reference):
    """Function: the stages that timm's tower of this dtype gives from the recorded pixels."""
    import copy

    from timm_naflex_fast.measure.pipelines import stages_of
    from timm_naflex_fast.measure.record import inputs_of

    def timms(dtype):
        tower = tiny_recordings.source_of(copy.deepcopy(model).to(dtype)).pipeline.tower
        inputs = inputs_of(reference.stages, tiny_recordings.LENGTH)
        return stages_of(inputs, tower(inputs))

    return timms


@pytest.mark.parametrize("kept", ["all stages", "tower's stages", "pooled alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_right_port_is_equal_in_its_precision(dtype, kept, timms, reference):
    ports = timms(dtype)
    if kept == "pooled alone":
        ports = [{"pooled": port["pooled"]} for port in ports]
    if kept == "tower's stages":
        for port in ports:
            del port["grid"], port["pixels"]
    found = tiny_recordings.compared(reference, ports, str(dtype).removeprefix("torch."))
    assert found.first is None and found.reason is None


def test_a_right_port_that_reads_the_pictures_with_another_resizer_is_equal(
    model, reference, pictures
):
    port = tiny_recordings.port_of(model)
    noise = np.random.default_rng(0)
    made = []
    for picture, own in zip(pictures, reference.stages):
        grid, pixels = READERS["bilinear"](picture, own["grid"])
        levels = noise.integers(-1, 2, pixels.shape) / 127.5
        made.append(port(grid, (pixels + levels).clip(-1, 1)))
    assert tiny_recordings.compared(reference, made).first is None
