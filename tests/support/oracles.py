"""What the tests compare with: timm's own methods, captured before anything is patched, and float64
truth."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType

import torch
from hypothesis import strategies as st
from timm.layers.patch_embed import PatchEmbedInterpolator
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from timm_naflex_fast.patching.decide import call_counts
from timm_naflex_fast.resampling import kept
from timm_naflex_fast.resampling.matrices import ResizeSpec, axis_matrix

PRISTINE = {cls: dict(cls.__dict__) for cls in (NaFlexEmbeds, NaFlexVit, PatchEmbedInterpolator)}
STOCK = {
    name: PRISTINE[NaFlexEmbeds][name]
    for name in PRISTINE[NaFlexEmbeds]
    if name.startswith("_apply_")
}
OLD_TORCH = not hasattr(torch.compiler, "is_exporting")  # its compiler and its export trace less
NEW_TIMM = "pos_embed_antialias" in inspect.signature(NaFlexEmbeds.__init__).parameters


def seed():
    """Seed what is here: ``torch.manual_seed`` writes down its callers where CUDA has not started,
    0.7 ms each time."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


def defined_in(module, function):
    """The function as if the module defined it: what a release might do, not what another package
    puts there."""
    made = FunctionType(
        function.__code__,
        vars(module),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_pristine():
    """Whether timm's classes hold exactly the functions they came with."""
    return all(
        cls.__dict__.get(k) is v
        for cls, kept in PRISTINE.items()
        for k, v in kept.items()
        if callable(v)
    )


def row_major(sizes, length=None, dtype=torch.int64):
    """Coordinates (B, N, 2) as timm's collator makes them: row-major, then (0, 0)."""
    length = max((h * w for h, w in sizes), default=1) if length is None else length
    coord = torch.zeros(len(sizes), length, 2, dtype=dtype)
    for sample, (h, w) in enumerate(sizes):
        grid = torch.cartesian_prod(torch.arange(h), torch.arange(w)).view(-1, 2)[:length]
        coord[sample, : len(grid)] = grid.to(dtype)
    return coord


@dataclass(kw_only=True)
class Case:
    """One configuration of a table and a batch; ``length`` None: as many tokens as the largest grid
    has."""

    table_size: tuple[int, int] = (6, 5)
    channels: int = 4
    mode: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    sizes: Sequence[tuple[int, int]] = ((3, 4), (9, 2), (3, 4), (6, 5))
    length: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 7
    kind: str = "learned"
    use_grid_sample: bool = False

    def __post_init__(self):
        if self.length is None:
            self.length = max(h * w for h, w in self.sizes)

    def embeds(self):
        extra = (
            dict(pos_embed_antialias=self.antialias, pos_embed_align_corners=self.align_corners)
            if NEW_TIMM
            else {}
        )
        extra |= dict(
            patch_size=1, in_chans=1, embed_dim=self.channels, proj_type="linear", class_token=False
        )
        extra |= dict(
            pos_embed=self.kind,
            pos_embed_grid_size=self.table_size,
            pos_embed_interp_mode=self.mode,
        )
        extra |= dict(
            pos_embed_ar_preserving=self.ar_preserving,
            pos_embed_use_grid_sample=self.use_grid_sample,
        )
        embeds, generator = NaFlexEmbeds(**extra), torch.Generator().manual_seed(self.seed)
        for table in tables(embeds):
            table.data.normal_(generator=generator)
        return embeds

    def x(self):
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(len(self.sizes), self.length, self.channels, generator=generator).to(
            self.dtype
        )

    def coord(self, dtype=torch.int64):
        return row_major(self.sizes, self.length, dtype)

    @property
    def options(self):
        return {
            name: getattr(self, name)
            for name in ("mode", "antialias", "align_corners", "ar_preserving")
        }

    @property
    def spec(self):
        return ResizeSpec(*self.options.values())


BASE = Case(length=21)


def tables(embeds):
    names = {"learned": ["pos_embed"], "factorized": ["pos_embed_y", "pos_embed_x"]}.get(
        embeds.pos_embed_type, []
    )
    return [getattr(embeds, name) for name in names]


@st.composite
def cases(draw, dtypes=(torch.float32,), largest=40, **fixed):
    """Tables 1..20 x 1..20 (now and then large enough for taps), grids 1..40 x 1..40, repeats and
    padding."""
    side, length = st.integers(1, largest // 2), st.integers(1, largest)
    long_side = st.integers(32, 48) if largest == 40 else side
    table = draw(
        st.one_of(
            st.tuples(side, side), st.tuples(side, side), st.tuples(long_side, side | long_side)
        )
    )
    shapes = [
        (length, length),
        (st.integers(1, 8), st.integers(1, 8)),
        (st.just(1), length),
        (length, st.just(1)),
    ]
    grid = st.one_of(*(st.tuples(*shape) for shape in shapes), st.just(table))
    distinct = draw(st.lists(grid, min_size=1, max_size=4))
    sizes = draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=6))
    longest = max(h * w for h, w in sizes)
    values = (
        dict(antialias=draw(st.booleans()), align_corners=draw(st.booleans())) if NEW_TIMM else {}
    )
    values |= dict(
        mode=draw(st.sampled_from(["bilinear", "bicubic"])), ar_preserving=draw(st.booleans())
    )
    values |= dict(table_size=table, channels=draw(st.integers(2, 9)), sizes=sizes)
    values |= dict(length=max(1, longest + draw(st.sampled_from([0, 0, 3, -1, -longest // 2]))))
    values |= dict(dtype=draw(st.sampled_from(dtypes)), seed=draw(st.integers(0, 2**20)))
    return Case(**(values | fixed))


def stock(case, embeds, x, coord):
    """timm's own NaFlex position embedding for this case, in place."""
    suffix = "_grid_sample" if case.use_grid_sample else ""
    STOCK[f"_apply_{case.kind}_naflex_pos_embed{suffix}"](embeds, x, patch_coord=coord)


def reference(table, size, spec):
    """The definition: a table (H0, W0, C) resampled to (h, w, C), as one product."""
    matrices = (axis_matrix(axis, size, table.shape[axis], spec, table.dtype) for axis in (0, 1))
    return torch.einsum("yh,xw,hwc->yxc", *matrices, table)


def relative(ours, theirs):
    """Largest difference over the largest value."""
    if theirs.numel() == 0:
        return 0.0
    return (
        (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-12)
    ).item()


def worst(got, want):
    """The largest relative error of a parameter's gradient."""
    assert got.keys() == want.keys()
    return max(relative(got[name], grad) for name, grad in want.items() if grad.abs().max() > 1e-7)


def trained(model, batch, run=None):
    """The output of ``run`` (the model itself) and each parameter's gradient, for a fixed random
    one of the output."""
    model.zero_grad()
    out = (model if run is None else run)(batch)
    # Not a square: that of a normalised output is a constant, and its gradient nothing but
    # rounding.
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).mean().backward()
    return out.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def far(got, want):
    """The largest relative error of the output and the gradients that ``trained`` gives."""
    return max(relative(got[0], want[0]), worst(got[1], want[1]))


def small_vit(**kwargs):
    """A NaFlexVit small enough for tests: width 32, depth 2, patches of 4, one input channel."""
    settings = dict(
        patch_size=4, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2.0, global_pool="avg"
    )
    settings |= dict(pos_embed_grid_size=(8, 8), class_token=False, reg_tokens=0) | kwargs
    seed()
    in_chans = settings.pop("in_chans", 1)
    model = NaFlexVit(NaFlexVitCfg(**settings), in_chans=in_chans, num_classes=5)
    for table in tables(model.embeds):
        torch.nn.init.normal_(table)
    return model


def vit_batch(sizes, patch=4, chans=1, seed=0):
    """A NaFlex input batch of random patches."""
    generator, coord = torch.Generator().manual_seed(seed), row_major(sizes)
    valid = torch.stack([torch.arange(coord.shape[1]) < h * w for h, w in sizes])
    patches = (
        torch.randn(*coord.shape[:2], patch * patch * chans, generator=generator) * valid[..., None]
    )
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}


BATCH = vit_batch([(3, 4), (5, 2), (3, 4), (8, 8), (4, 9)])


def embeds(model, batch=BATCH):
    out = model.embeds(batch["patches"], patch_coord=batch["patch_coord"])
    return out[0] if isinstance(out, tuple) else out


embed = torch.no_grad()(embeds)


def uses(model):
    """Who computes a model's position embeddings: counted while it runs, and its result must be
    that one's."""
    before = call_counts.calls.copy()
    got = embed(model)
    ran = {strategy for (step, strategy) in call_counts.calls - before if step == "pos_embed"}
    (who,) = ran or {"stock"}  # nothing is counted while nothing is patched
    want = model.embeds.norm(model.embeds.proj(BATCH["patches"])).detach().clone()
    with torch.no_grad():
        STOCK["_apply_learned_naflex_pos_embed"](
            model.embeds, want, patch_coord=BATCH["patch_coord"]
        )
    assert torch.allclose(got, want, atol=1e-5) == (who != "grid_sample")
    assert torch.equal(got, want) or who in ("grid_sample", "matmul")
    return who


def finished_tables():
    """How many resized tables and kernels are kept."""
    return kept.stats()[0].get(kept.RESIZED, 0)


def kept_tensors():
    """Every tensor that is kept, contents of parameters too."""

    def tensors(value):
        if isinstance(value, Tensor):
            return [value]
        kept = (
            (*(c.tensor for c in value.copies), *value.made.values())
            if hasattr(value, "made")
            else ()
        )
        parts = value if isinstance(value, tuple) else kept
        return [tensor for part in parts for tensor in tensors(part)]

    return tensors(tuple(kept._entries.values()))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if (
                isinstance(tensor, torch.Tensor) and tensor.dtype is not torch.uint8
            ):  # matmul's hint to the allocator
                self.elements = max(
                    self.elements, tensor._nnz() if tensor.is_sparse else tensor.numel()
                )
        return out
