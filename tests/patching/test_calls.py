"""Proof of effect: who computed what since enable(), and why a library's own code ran instead."""

import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from oracles import BATCH, NEW_TIMM, STOCK, embed, row_major, small_vit
from timm.layers import patch_embed
from timm.models.naflexvit import NaFlexEmbeds
from torch import nn
from torch.nn.utils import parametrize

from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import library, timm
from timm_naflex_fast.patching.install import Status
from timm_naflex_fast.patching.settings import Settings


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize(
    ("mode", "flagged", "who", "plain"),
    [
        ("matmul", False, "matmul", "matmul"),
        ("interpolate_cached", False, "interpolate_cached", "interpolate_cached"),
        ("grid_sample", False, "grid_sample", "stock"),
        ("matmul", True, "grid_sample", "matmul"),
        ("grid_sample", True, "grid_sample", "stock"),
        ("interpolate_cached", True, "stock", "interpolate_cached"),
    ],
)
def test_who_computes_the_position_embeddings(kind, mode, flagged, who, plain):
    model = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged)
    enable(mode)
    embed(model), embed(model)
    assert status().calls == {("pos_embed", who): 2} and status().fallbacks == {}
    enable(mode)
    model.embeds(torch.zeros(1, 1, 24, 28))
    assert status().calls == {("pos_embed", plain): 1}
    suffix = "_grid_sample" if flagged else ""
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_naflex_pos_embed{suffix}"] == who
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_pos_embed"] == plain


@pytest.mark.usefixtures("clean")
@pytest.mark.skipif(not NEW_TIMM, reason="an older interpolator has no resampler")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("who", ["matmul", "stock"])
def test_patch_kernels_and_rotary_tables(who, frozen):
    model = small_vit(enable_patch_interpolator=True, rope_type="axial").requires_grad_(not frozen)
    other = small_vit()
    enable(model=other)  # so that ours is in place when timm's own is chosen
    with enable("matmul" if who == "matmul" else "stock"):
        batch = dict(patches=torch.randn(1, 6, 3, 5, 1), patch_coord=row_major([(2, 3)]))
        for _ in range(3):
            model(batch | {"patch_valid": torch.ones(1, 6).bool()})
        rope = "batched" if who == "matmul" else "stock"
        assert status().calls == {("pos_embed", who): 3, ("patch_embed", who): 3, ("rope", rope): 3}


def test_an_inner_with_counts_for_itself():
    model = small_vit()
    with enable():
        embed(model)
        with enable("interpolate_cached"):
            assert status().calls == {}
            embed(model), embed(model)
            assert status().calls == {("pos_embed", "interpolate_cached"): 2}
        embed(model)
        assert status().calls == {("pos_embed", "matmul"): 2}
    assert status().calls == {}
    enable()
    embed(model)
    assert "pos_embed: matmul" in str(status())
    disable()
    assert status().calls == {} and "nothing is patched in this process" in str(status())


@pytest.mark.usefixtures("clean")
def test_enabled_and_never_used_is_said():
    enable()
    assert "(nothing yet)" in str(status())


@pytest.mark.skipif(timm.TIMM_SAMPLER != "grid_sample", reason="the flag of older timm cannot be vmapped")
@pytest.mark.usefixtures("clean")
def test_fallbacks_are_named_and_the_chosen_result_is_kept():
    model = small_vit().requires_grad_(False)
    patches, coord = BATCH["patches"], BATCH["patch_coord"]

    def by_sample(patches, coord):
        x = model.embeds.proj(patches[None])
        model.embeds._apply_learned_naflex_pos_embed_grid_sample(x, coord[None])
        return x

    want = torch.stack([by_sample(p, c)[0] for p, c in zip(patches, coord)])
    enable("grid_sample")

    def default(patches, coord):
        x = model.embeds.proj(patches[None])
        model.embeds._apply_learned_naflex_pos_embed(x, coord[None])
        return x[0]

    got = torch.func.vmap(default)(patches, coord)  # timm's own code of the flag, not that of its default
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert status().calls == {("pos_embed", "stock"): 1} and status().fallbacks == {"a torch.func transform": 1}
    assert "1 times because of a torch.func transform" in str(status())


@pytest.mark.usefixtures("clean")
def test_each_reason_is_warned_of_once():
    model = small_vit()
    library.warned.clear()
    enable()

    def who(x, reason=()):
        key = timm.EMBEDS, "_apply_learned_naflex_pos_embed"
        assert library.resolve_impl(timm.LIBRARY, model.embeds, key, x, inputs=lambda _: reason)[0] == "stock"
        return x

    for reason, run in {
        "a torch.func transform": lambda: torch.func.vmap(who)(torch.ones(2)),
        "a meta tensor": lambda: who(torch.ones(2, device="meta")),
        "a position table with interpolation mode 'nearest'": lambda: who(
            torch.ones(2), "a position table with interpolation mode 'nearest'"
        ),
    }.items():
        with pytest.warns(UserWarning, match=f"{reason} stays with timm's own code"):
            run()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
        assert status().fallbacks[reason] == 2


def test_the_status_in_words():
    state = Status(
        Settings("matmul"),
        (Settings("stock", "matmul", "batched"),),
        {"Long.method_of_timm": "matmul", "Short.one": "stock"},
        "1.0",
        "2.0",
        {("rope", "batched"): 12, ("pos_embed", "matmul"): 3},
        {"a reason": 2, "another": 1},
        ("NaFlexVit",),
        {("timm", "pos_embed", "matmul"): ["matmul", "stock", "matmul"], ("timm", "patch_embed", "stock"): ["stock"]},
        ("a note",),
    )
    assert str(state).splitlines() == [
        "timm_naflex_fast on timm 1.0, torch 2.0",
        "",
        "computed                   by, in every model",
        "-------------------------  ----------------------------------------------------------",
        "timm: position embeddings  matmul (models made with pos_embed_use_grid_sample: stock)",
        "timm: patch kernels        stock",
        "one NaFlexVit has its own: pos_embed=stock, patch_embed=matmul, rope=batched",
        "",
        "what ran since enable()  calls",
        "-----------------------  -----",
        "pos_embed: matmul        3",
        "rope: batched            12",
        "the library's own code ran 2 times because of a reason",
        "the library's own code ran 1 times because of another",
        "a note",
    ]


@pytest.mark.usefixtures("clean")
@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_while_tracing_plain_images_alone_are_left_to_timm(kind, monkeypatch):
    model = small_vit(pos_embed=kind)
    monkeypatch.setattr(timm, "recorded", lambda: True)
    monkeypatch.setattr(timm, "tracer", lambda: "export")
    enable()
    embed(model)
    assert status().calls == {("pos_embed", "matmul"): 1}
    model.embeds(torch.randn(2, 1, 20, 36))
    assert status().calls == {("pos_embed", "matmul"): 1, ("pos_embed", "stock"): 1}


def test_the_librarys_own_functions_are_found_patched_or_not():
    class Derived(NaFlexEmbeds):
        pass

    name, function = "_apply_learned_naflex_pos_embed", patch_embed.resample_patch_embed
    for context in (enable(), nullcontext()):
        with context:
            assert library.original(NaFlexEmbeds, name) is library.original(Derived, name) is STOCK[name]
            assert library.original(patch_embed, "resample_patch_embed") is function


def test_whoever_wants_stock_has_no_fallback():
    meta, asked = (torch.zeros(2, device="meta"),), []
    assert library.resolve("stock", meta, lambda _: asked.append(1) or "a reason") == ("stock", None)
    assert library.resolve("matmul", meta, lambda _: asked.append(1) or "a reason") == ("stock", "a meta tensor")
    assert not asked  # what ours would compute with is not even read
    assert library.resolve("matmul", (), lambda _: "a reason") == ("stock", "a reason")
    assert library.resolve("matmul", (), lambda _: meta) == ("stock", "a meta tensor")
    assert library.resolve("matmul", (), lambda _: "") == ("stock", "")


def test_the_status_of_an_unpatched_process_in_words():
    first, empty, last = str(status()).splitlines()
    assert first.startswith("timm_naflex_fast on timm ") and empty == ""
    assert last.startswith("nothing is patched in this process")


class Counted(nn.Module):
    """A parametrization that counts how often the table is computed."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def forward(self, table):
        self.times += 1
        return table * 2


@pytest.mark.usefixtures("clean")
@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("mode", ["stock", "matmul", "interpolate_cached", "grid_sample"])
def test_a_parametrized_table_is_computed_as_often_as_by_timm_or_once(mode, flagged, kind):
    """Spectral norm, weight norm and LoRA compute it at each reading; the first also changes its state then."""
    model, other, counted = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged), small_vit(), []
    for name in ("pos_embed",) if kind == "learned" else ("pos_embed_y", "pos_embed_x"):
        counted.append(Counted())
        parametrize.register_parametrization(model.embeds, name, counted[-1])

    def times(run):
        for each in counted:
            each.times = 0
        run()
        return [each.times for each in counted]

    def transformed():
        x, coord = model.embeds.proj(BATCH["patches"]), BATCH["patch_coord"]
        add = getattr(model.embeds, f"_apply_{kind}_naflex_pos_embed")
        torch.func.grad(lambda x: (add(x.mul(1), patch_coord=coord), x.sum())[1])(x)

    for run in (lambda: embed(model), lambda: model.embeds(torch.zeros(1, 1, 24, 28)), transformed):
        timms, once = times(run), [1] * len(counted)
        enable("matmul", model=other)  # so that ours is in place when timm's own is chosen
        enable(mode)
        ran = times(run)
        (impl,) = {impl for _, impl in status().calls}
        # Where ours cannot run, "grid_sample" calls timm's method of that name, which computes the table once.
        assert ran == once or (impl == "stock" and ran == timms), (impl, timms)
        disable()


@pytest.mark.usefixtures("clean")
def test_the_status_of_one_model():
    model, other = small_vit(), small_vit(pos_embed_use_grid_sample=True)
    enable("interpolate_cached", patch_embed="stock")
    enable("matmul", model=model)
    name = "NaFlexEmbeds._apply_learned_naflex_pos_embed"
    assert status(model).flags.pos_embed == status(model).replaced[name] == "matmul"
    assert status(other).flags.pos_embed == status(other).replaced[name] == "interpolate_cached"
    assert "by, in this NaFlexVit" in str(status(model)) and "has its own" not in str(status(model))
    assert "one NaFlexVit has its own: pos_embed=matmul" in str(status())
    assert status().model_classes == ("NaFlexVit",) and "by, in every model" in str(status())
    with pytest.raises(ValueError, match="Linear contains no timm NaFlexEmbeds"):
        status(nn.Linear(1, 1))
    enable("stock", model=model)
    assert status(model).flags.is_stock and set(status(model).replaced.values()) == {"stock"}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("version", "named"), [("1.0.29", True), ("1.0.30", False), ("1.0.31.dev0", False)])
def test_a_timm_that_resamples_siglip_by_bicubic_is_named(version, named, monkeypatch):
    enable()
    monkeypatch.setattr(sys.modules["timm"], "__version__", version)
    assert ("SigLIP-2's position table by bicubic" in str(status())) == named
    assert ("SigLIP-2's position table by bicubic" in str(status(small_vit()))) == named
