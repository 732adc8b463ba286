"""Rotary tables: equal to timm's own, in every form, with their gradients, and inside whole models."""

import copy
import inspect
import math
import weakref
from types import SimpleNamespace

import pytest
import timm
import timm.layers.pos_embed_sincos as timms
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import PRISTINE, Largest, relative, row_major, small_vit, vit_batch
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

from timm_naflex_fast import disable, enable, replacements, status
from timm_naflex_fast.rope import batched_rope, read_rope
from timm_naflex_fast.rope.mixed import _Collect, _Spread

FIELDS = inspect.signature(NaFlexVitCfg).parameters
if "rope_type" not in FIELDS:
    pytest.skip("this timm's NaFlexVit has no rotary embeddings", allow_module_level=True)

CLASSES = {
    name: getattr(timms, cls)
    for name, cls in (
        ("axial", "RotaryEmbeddingCat"),
        ("dinov3", "RotaryEmbeddingDinoV3"),
        ("mrope", "RotaryEmbeddingMRope"),
        ("mixed", "RotaryEmbeddingMixed"),
    )
    if hasattr(timms, cls)
}
AUGMENTED = [
    kind for kind, cls in CLASSES.items() if "shift_coords" in inspect.signature(cls).parameters or kind == "dinov3"
]
NEW_TIMM = hasattr(timms, "_build_grid")  # per-grid reference shapes, augmentation and dtypes of every type
DIM, HEADS, DEPTH = 16, 3, 2


def build(kind, **options):
    """timm's module, with those of the options that the installed one takes."""
    cls = CLASSES[kind]
    if kind == "axial":
        options = dict(in_pixels=False) | options
    elif kind == "mrope":
        options = dict(mrope_section=(2, 3, 3)) | options
    elif kind == "mixed":
        options = dict(depth=DEPTH, num_heads=HEADS) | options
    takes = inspect.signature(cls).parameters
    if "takes_all" not in options and kind in ("mrope", "mixed"):  # types that have fewer settings
        options = {k: v for k, v in options.items() if k not in ("grid_offset", "rotate_half", "ref_feat_shape")}
    options = {k: v for k, v in options.items() if k in takes}
    if kind == "mrope":
        options.pop("grid_indexing", None)
    return cls(DIM * HEADS if kind == "mixed" else DIM, **options)


def as_tensor(tables):
    return tables if isinstance(tables, torch.Tensor) else torch.stack(list(tables))


def stock(rope, x, coord, prefix=0):
    """timm's own result; mixed ones stacked. Releases between 1.0.20 and 1.0.31 cannot make mixed ones: by sample."""
    vit = SimpleNamespace(rope=rope, rope_is_mixed=hasattr(rope, "freqs"), num_prefix_tokens=prefix)
    try:
        return as_tensor(PRISTINE[NaFlexVit]["_generate_rope_naflex"](vit, x, coord))
    except TypeError:
        assert vit.rope_is_mixed and not NEW_TIMM
    out = torch.zeros(DEPTH, len(x), HEADS, x.shape[1] - prefix, 2 * DIM)
    for sample, (h, w) in enumerate((coord.amax(1) + 1).tolist()):
        out[:, sample, :, : h * w] = rope.get_embed((h, w))
    return out.to(x.dtype)


def ours(rope, x, coord, in_graph=False, prefix=0):
    described = read_rope(rope)
    assert not isinstance(described, str), described
    return as_tensor(batched_rope(described, coord, x.dtype, in_graph=in_graph))


@st.composite
def batches(draw):
    """Grids with repeats; a little padding; a batch too large for the form for few tokens, now and then."""
    side = st.integers(1, 12)
    distinct = draw(st.lists(st.tuples(side, side), min_size=1, max_size=5))
    sizes = draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=6)) * draw(st.sampled_from([1, 1, 20]))
    return row_major(sizes, max(h * w for h, w in sizes) + draw(st.sampled_from([0, 0, 3])))


@st.composite
def ropes(draw, kind):
    options = dict(
        temperature=draw(st.sampled_from([10.0, 100.0, 10000.0])),
        grid_offset=draw(st.sampled_from([0.0, 0.5, -0.25])),
        grid_indexing=draw(st.sampled_from(["ij", "xy"])),
        rotate_half=draw(st.booleans()),
        normalize_coords=draw(st.sampled_from(["separate", "min", "max"])) if kind == "dinov3" else "separate",
        mrope_section=draw(st.sampled_from([(2, 3, 3), (8, 12, 12), (6, 1, 1)])),
    )
    if kind == "axial" and draw(st.booleans()):
        options["ref_feat_shape"] = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return build(kind, **options)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "in graph"])
@settings(max_examples=40)
@given(data=st.data())
def test_equals_timm(kind, in_graph, data):
    rope, coord = data.draw(ropes(kind)), data.draw(batches())
    prefix = data.draw(st.integers(0, 2))
    x = torch.zeros(len(coord), prefix + coord.shape[1], 4)
    want = stock(rope, x, coord, prefix)
    got = ours(rope, x, coord.to(data.draw(st.sampled_from([torch.int64, torch.int32, torch.float32]))), in_graph)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    past = torch.arange(coord.shape[1]) >= (coord.amax(1) + 1).prod(1)[:, None]
    assert (got.movedim(-2, -1).movedim(-4, -2)[..., past] == 0).all()  # padding: zeros, also where timm has them


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "in graph"])
def test_other_dtypes(kind, dtype, in_graph):
    rope, coord = build(kind), row_major([(9, 7), (3, 5), (9, 7), (16, 8)] * 4)
    x = torch.zeros(*coord.shape[:2], 4)
    want, got = stock(rope, x, coord).to(dtype), ours(rope, x.to(dtype), coord, in_graph)
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0  # a tie may round the other way
    torch.testing.assert_close(got, want, rtol=step, atol=2e-6)


@pytest.mark.skipif(not NEW_TIMM, reason="older timm keeps its frequencies in the model's dtype")
@pytest.mark.parametrize("kind", CLASSES)
def test_models_in_other_dtypes(kind):
    coord = row_major([(9, 7), (3, 5), (9, 7), (16, 8)] * 4)
    for dtype in (torch.bfloat16, torch.float64):
        rope, x = build(kind).to(dtype), torch.zeros(*coord.shape[:2], 4, dtype=dtype)
        want = stock(rope, x, coord)
        for in_graph in (False, True):
            got = ours(rope, x, coord, in_graph)
            assert got.dtype == want.dtype
            # In float64 as far as timm goes: its positions are float32.
            torch.testing.assert_close(
                got, want, rtol=torch.finfo(torch.bfloat16).eps if dtype.itemsize < 4 else 0, atol=2e-6
            )


@pytest.mark.skipif("dinov3" not in CLASSES or NEW_TIMM, reason="newer timm keeps periods in float32 at least")
def test_low_precision_periods_stay_with_timm():
    assert "periods" in read_rope(build("dinov3").bfloat16())


@pytest.mark.parametrize("kind", CLASSES)
@settings(max_examples=15)
@given(data=st.data())
def test_reordered_tokens_take_the_cell_their_coordinate_names(kind, data):
    rope, coord = data.draw(ropes(kind)), data.draw(batches())
    order = torch.stack([torch.randperm(coord.shape[1]) for _ in coord])
    tokens = (coord.amax(1) + 1).prod(1)
    for sample, count in enumerate(tokens):  # padding stays at the end
        order[sample] = torch.cat([torch.randperm(int(count)), torch.arange(int(count), coord.shape[1])])
    x = torch.zeros(*coord.shape[:2], 4)
    moved = coord.gather(1, order[..., None].expand_as(coord))
    for in_graph in (False, True):
        want, got = (ours(rope, x, c, in_graph).movedim(-2, -1).movedim(-4, -2) for c in (coord, moved))
        torch.testing.assert_close(got, want.gather(-1, order.expand_as(want)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", CLASSES)
def test_dropped_tokens_keep_their_places(kind):
    """timm refuses a batch shorter than a grid; here each token still has a place."""
    rope, full = build(kind), row_major([(9, 12)] * 12)
    kept = torch.randperm(108)[:50].sort().values
    kept[-1] = 107  # so that the grid is the same
    x = torch.zeros(12, 108, 4)
    for in_graph in (False, True):
        want = ours(rope, x, full, in_graph)[..., kept, :]
        torch.testing.assert_close(ours(rope, x, full[:, kept], in_graph), want, rtol=0, atol=1e-6)


AUGMENTATIONS = [
    dict(shift_coords=0.3),
    dict(jitter_coords=1.4),
    dict(rescale_coords=2.0),
    dict(shift_coords=0.2, jitter_coords=1.3, rescale_coords=1.7),
]


@pytest.mark.parametrize("kind", AUGMENTED)
@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=lambda a: "+".join(a))
@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_random_coordinates_are_timms_for_the_same_seed(kind, augmentation, indexing):
    rope = build(kind, grid_indexing=indexing, **augmentation)
    for coord in (row_major([(9, 7), (3, 5), (9, 7), (16, 8), (1, 4)] * 4), row_major([(3, 5)])):
        x = torch.zeros(*coord.shape[:2], 4)
        torch.manual_seed(3)
        want = stock(rope, x, coord)
        after = torch.rand(())
        torch.manual_seed(3)
        torch.testing.assert_close(ours(rope, x, coord), want, rtol=0, atol=5e-6)
        assert torch.rand(()) == after  # as many numbers were drawn
        rope.eval()
        still = stock(rope, x, coord)
        assert not torch.allclose(still, want, atol=1e-3)
        torch.testing.assert_close(ours(rope, x, coord), still, rtol=0, atol=2e-6)
        rope.train()


def frequency_grad(rope, tables, weights):
    rope.freqs.grad = None
    sum((table * weight).sum() for table, weight in zip(tables, weights)).backward()
    return rope.freqs.grad.clone()


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "in graph"])
@settings(max_examples=20)
@given(data=st.data())
def test_gradients_of_mixed_frequencies(in_graph, data):
    rope, coord = data.draw(ropes("mixed")), data.draw(batches())
    x = torch.zeros(*coord.shape[:2], 4)
    want = stock(rope, x, coord)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    want = frequency_grad(rope, want, weights)
    got = frequency_grad(rope, batched_rope(read_rope(rope), coord, x.dtype, in_graph=in_graph), weights)
    assert relative(got, want) <= 1e-5


@pytest.mark.skipif(not NEW_TIMM, reason="mixed tables of older timm cannot be made in bfloat16")
def test_low_precision_gradients_are_no_worse_than_timms():
    rope, coord = build("mixed"), row_major([(4, 5)] * 200)
    x = torch.zeros(*coord.shape[:2], 4)
    weights = torch.randn(DEPTH, 200, HEADS, 20, 2 * DIM).bfloat16()
    truth = frequency_grad(rope, stock(rope, x, coord), weights.float())
    low = x.bfloat16()
    theirs = relative(frequency_grad(rope, stock(rope, low, coord), weights), truth)
    got = relative(frequency_grad(rope, batched_rope(read_rope(rope), coord, low.dtype), weights), truth)
    assert got <= 1e-5 < theirs


def test_spreading_is_linear_and_differentiable_twice():
    table = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    index = torch.randint(7, (3, 2, 5))
    collect = lambda t: _Collect.apply(t, index, 6, torch.float64)
    spread = lambda t: _Spread.apply(t, index, torch.float64)
    for function, argument in ((spread, table), (collect, tokens)):
        assert torch.autograd.gradcheck(function, argument)
        assert torch.autograd.gradgradcheck(function, argument)
    assert (spread(table)[index == 6] == 0).all()
    # In pieces, as low precision is added up, the sum is the same.
    many = torch.randn(600, 8, 20, 128).bfloat16()
    where = torch.randint(51, many.shape[:3], dtype=torch.int32)
    want = torch.zeros(51, 128).index_add_(0, where.flatten(), many.float().flatten(0, 2))[:50]
    assert relative(_Collect.apply(many, where, 50, torch.float32), want) <= 1e-5


def test_mixed_tables_start_anew_and_keep_nothing_per_token():
    rope, coord = build("mixed", depth=4), row_major([(9, 12), (4, 4), (12, 9)] * 8)
    tables = batched_rope(read_rope(rope), coord, torch.float32)
    assert [len(list(tables)), len(list(tables))] == [4, 4]
    assert torch.equal(next(iter(tables)), next(iter(tables)))
    with torch.no_grad():
        first = next(iter(tables))
        watched = weakref.ref(first)
        del first
        assert watched() is None  # made when asked for, and let go
    saved: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.__setitem__(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        kept = list(batched_rope(read_rope(rope), coord, torch.float32))
    per_token_and_channel = kept[0].nbytes // kept[0].shape[-1]
    assert sum(saved.values()) <= kept[0].nbytes  # timm keeps what makes every block's table, 4 of them here
    assert sum(saved.values()) > per_token_and_channel / 4  # and we the index: the hooks do see it


def vit(kind, **extra):
    """A model with this kind of rotary embeddings alone, in eval mode."""
    options = {"dinov3": dict(rope_temperature=100.0), "mrope": dict(rope_mrope_section=(2, 3, 3))}.get(kind, {})
    return small_vit(**(dict(pos_embed="none", rope_type=kind, depth=3) | options | extra)).eval()


KINDS = [kind for kind in CLASSES if kind != "dinov3" or "rope_rotate_half" in FIELDS]
RUNS = [kind for kind in KINDS if kind != "mixed" or NEW_TIMM]  # what timm itself can run as a whole model
BATCH = vit_batch([(3, 4), (12, 9), (3, 4), (8, 8), (4, 9)] * 4)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("extra", ["plain", "patch dropout", "checkpointing", "class token", "autocast"])
def test_whole_models(kind, extra):
    options = {"patch dropout": dict(patch_drop_rate=0.4), "class token": dict(class_token=True, reg_tokens=2)}
    model = vit(kind, **options.get(extra, {})).train()
    model.set_grad_checkpointing(extra == "checkpointing")

    def step():
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=extra == "autocast"):
            out = model(BATCH).float()
        out.square().mean().backward()
        return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    want, want_grads = step()
    with enable("stock", rope="batched"):
        got, grads = step()
    assert relative(got, want) <= 1e-5
    low = extra == "autocast"
    assert all(
        relative(grads[name], g) <= (2e-2 if low else 1e-4) for name, g in want_grads.items() if g.abs().max() > 1e-6
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("eva02_tiny_patch14_224", "axial"),
        ("vit_small_patch16_rope_mixed_224", "mixed"),
        ("vit_small_patch16_dinov3", "dinov3"),
    ],
)
def test_models_timm_makes(name, kind):
    if kind not in RUNS:
        pytest.skip("this timm cannot run it")
    try:
        model = timm.create_model(name, use_naflex=True, depth=2).eval()
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"this timm cannot make it: {error}")
    patch = model.embeds.patch_size[0]
    batch = vit_batch([(5, 7), (16, 11), (3, 3), (16, 11)] * 4, patch=patch, chans=3)
    with torch.no_grad():
        want = model(batch)
        with enable():
            assert relative(model(batch), want) <= 1e-5
        with enable(), torch.inference_mode():
            assert relative(model(batch), want) <= 1e-5


@pytest.fixture
def fresh_compiler():
    """PyTorch compiles a function for so many models and then no more, in the tests after these either."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_captures_in_one_graph(kind, train, fresh_compiler):
    model = vit(kind)
    batches = [BATCH, vit_batch([(2, 6), (7, 5), (9, 1)] * 8, seed=1)]
    with enable(), torch.set_grad_enabled(train):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        for batch in batches:  # another batch needs no host reads either
            want = model(batch)
            got = compiled(batch)
            assert relative(got, want) <= 1e-5
            if train and kind == "mixed":
                grads = []
                for out in (want, got):
                    model.zero_grad()
                    out.square().mean().backward()
                    grads.append(model.rope.freqs.grad)
                assert relative(grads[1], grads[0]) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_exports(kind):
    model = vit(kind)
    with enable(), torch.no_grad():
        exported = torch.export.export(model, (dict(BATCH),), strict=False).module()
        other = vit_batch([(12, 9), (2, 2), (5, 6), (1, 9), (10, 10)] * 4, seed=2)
        assert relative(exported(other), model(other)) <= 1e-5


@pytest.mark.parametrize("kind", CLASSES)
def test_tracers_and_transforms_meet_plain_operations(kind):
    rope, coord = build(kind), BATCH["patch_coord"]
    x = torch.zeros(*coord.shape[:2], 4)
    want = ours(rope, x, coord)

    def replacement(rope, x, coord):
        model = torch.nn.Module()  # a NaFlexVit as far as the rotary tables look at it
        model.rope, model.num_prefix_tokens = rope, 0
        return as_tensor(replacements._generate_rope_naflex(model, x, coord))

    with enable():
        got = replacement(copy.deepcopy(rope).to("meta"), x.to("meta"), coord.to("meta"))
        assert got.shape == want.shape and got.device.type == "meta"
        by_sample = torch.func.vmap(lambda x, c: replacement(rope, x[None], c[None]))(x, coord)
    assert relative(by_sample, want.movedim(-4, 0).unsqueeze(-4)) <= 1e-5


@pytest.mark.parametrize("kind", CLASSES)
def test_empty_batch(kind):
    x, coord = torch.zeros(0, 12, 4), torch.zeros(0, 12, 2, dtype=torch.long)
    want = (DEPTH, 0, HEADS, 12, 2 * DIM) if kind == "mixed" else (0, 1, 12, 2 * DIM)
    assert ours(build(kind), x, coord).shape == want


def test_flag_and_choice_of_one_model(monkeypatch):
    mine, other, calls = vit("axial"), vit("axial"), []
    monkeypatch.setattr(replacements, "batched_rope", lambda *a, **k: calls.append(0) or batched_rope(*a, **k))

    def used(model):
        calls.clear()
        with torch.no_grad():
            model(BATCH)
        return bool(calls)

    assert not used(mine)
    for mode in ("matmul", "grid_sample", "interpolate_cached"):
        with enable(mode):
            assert used(mine) and status().replaced["NaFlexVit._generate_rope_naflex"] == "batched"
    with enable(rope="stock"):
        assert not used(mine) and status().replaced["NaFlexVit._generate_rope_naflex"] == "stock"
    enable("stock", rope="batched", model=mine)
    assert used(mine) and not used(other)
    enable()
    disable(mine)
    assert used(other) and not used(mine)


class OtherRope(timms.RotaryEmbeddingCat):
    """A user's own."""


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: OtherRope(16, in_pixels=False), "type OtherRope"),
        (lambda: timms.RotaryEmbeddingCat(16), "'pixel' grid"),
        (lambda: timms.RotaryEmbeddingCat(16, feat_shape=(3, 4), in_pixels=False), "for one grid alone"),
    ],
)
def test_what_we_do_not_know_stays_with_timm_and_is_said_once(module, reason, monkeypatch, recwarn):
    model = vit("axial")
    model.rope = module()
    replacements.warned.clear()
    asked = []
    enable()
    monkeypatch.setitem(replacements.originals, "_generate_rope_naflex", lambda *a: asked.append(a) or "timm's")
    for _ in range(2):
        assert model._generate_rope_naflex(torch.zeros(1, 2, 4), torch.zeros(1, 2, 2)) == "timm's"
    assert len(asked) == 2 and len(recwarn) == 1 and reason in str(recwarn[0].message)


@pytest.mark.skipif(not NEW_TIMM, reason="NaFlexVit of older timm has no random coordinates")
def test_random_coordinates_in_a_graph_stay_with_timm(monkeypatch):
    model = vit("axial", rope_shift_coords=0.3).train()
    replacements.warned.clear()
    monkeypatch.setattr(replacements, "_capturing", lambda: True)
    with enable(), pytest.warns(UserWarning, match="random rotary coordinates"):
        torch.manual_seed(0)
        got = model._generate_rope_naflex(torch.zeros(20, 108, 4), BATCH["patch_coord"])
    torch.manual_seed(0)
    assert torch.equal(got, model._generate_rope_naflex(torch.zeros(20, 108, 4), BATCH["patch_coord"]))


def test_wrong_inputs_are_named():
    model = vit("axial")
    enable()
    x = torch.zeros(2, 6, 32)
    for coord in (torch.zeros(2, 6), torch.zeros(2, 5, 2), torch.zeros(3, 6, 2)):
        with pytest.raises(ValueError, match=r"patch_coord must hold .* \(2, 6, 2\)"):
            model._generate_rope_naflex(x, coord)
    coord = row_major([(40, 40)] * 2)
    coord[1, 5, 0] = -1
    with pytest.raises(ValueError, match="sample 1 holds a negative"):
        model._generate_rope_naflex(torch.zeros(2, 1600, 4), coord)


def test_angles_are_the_formula():
    """The README's line, by hand: angle = p_0 f_0 + p_1 f_1."""
    rope, coord = build("axial", temperature=100.0), row_major([(5, 6)] * 40)
    table = ours(rope, torch.zeros(40, 30, 4), coord)[0, 0].double()
    for token in range(30):
        y, x = divmod(token, 6)
        for c in range(DIM // 2):
            angle = (y if c < DIM // 4 else x) / 100 ** ((c % (DIM // 4)) / (DIM // 4))
            for twin in (2 * c, 2 * c + 1):
                assert math.isclose(table[token, twin], math.sin(angle), abs_tol=1e-6)
                assert math.isclose(table[token, DIM + twin], math.cos(angle), abs_tol=1e-6)


@pytest.mark.parametrize("kind", CLASSES)
def test_one_huge_coordinate_makes_no_huge_table(kind):
    rope, coord = build(kind), row_major([(9, 7), (3, 5)] * 20)
    coord[1, 2, 0] = 2**31 - 2
    with Largest() as largest:
        got = ours(rope, torch.zeros(40, 63, 4), coord)
    assert largest.elements <= 40 * 63 * 2 * DIM * (HEADS * DEPTH if kind == "mixed" else 1)
    torch.testing.assert_close(got, ours(rope, torch.zeros(40, 63, 4), coord, in_graph=True), rtol=0, atol=2e-6)
    coord[1, 2, 0] += 1
    with pytest.raises(ValueError, match="sample 1 holds a negative or non-finite coordinate, or one beyond"):
        ours(rope, torch.zeros(40, 63, 4), coord)


@pytest.mark.skipif(not NEW_TIMM, reason="older timm draws no random coordinates for every type")
@pytest.mark.parametrize("kind", CLASSES)
def test_random_coordinates_by_token_are_those_by_cell(kind, monkeypatch):
    rope = build(kind, shift_coords=0.3, jitter_coords=1.2, rescale_coords=1.3, takes_all=True).train()
    coord, tables = row_major([(9, 7), (3, 5), (9, 7)]), []
    for by_token in (False, True):
        monkeypatch.setattr("timm_naflex_fast.rope.batched.too_many", lambda *_, answer=by_token: answer)
        torch.manual_seed(0)
        tables.append(ours(rope, torch.zeros(3, 63, 4), coord))
    torch.testing.assert_close(*tables, rtol=0, atol=2e-6)
