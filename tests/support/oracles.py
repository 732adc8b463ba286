"""What the tests compare with: timm's own methods, captured before anything is patched.

And batches, tables and small models that are made the same way everywhere.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from unittest import mock

import torch
from hypothesis import strategies as st
from timm.layers.patch_embed import PatchEmbedInterpolator
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from timm_naflex_fast import tracing
from timm_naflex_fast.patching import calls
from timm_naflex_fast.pos_embed import kept
from timm_naflex_fast.pos_embed.table import factorized_spec, learned_spec

PRISTINE = {cls: dict(cls.__dict__) for cls in (NaFlexEmbeds, NaFlexVit, PatchEmbedInterpolator)}
STOCK = PRISTINE[NaFlexEmbeds]
OLD_TORCH = not hasattr(torch.compiler, "is_exporting")  # its compiler and its export trace less
NEW_TIMM = "pos_embed_antialias" in inspect.signature(NaFlexEmbeds.__init__).parameters


def seed():
    """Seed what is here.

    Without CUDA not by ``torch.manual_seed``, which takes 0.7 ms to write down who called it.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


def seeded(number):
    """A random generator of its own."""
    return torch.Generator().manual_seed(number)


def defined_in(module, function):
    """The function as if the module defined it, as a release might."""
    code, name = function.__code__, function.__name__
    made = FunctionType(code, vars(module), name, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_pristine():
    """Whether timm's classes hold exactly the functions they came with."""
    for cls, members in PRISTINE.items():
        for name, member in members.items():
            if callable(member) and vars(cls).get(name) is not member:
                return False
    return True


def row_major(sizes, length=None, dtype=torch.int64):
    """Coordinates (B, N, 2) as timm's collator makes them: row-major, then (0, 0)."""
    if length is None:
        length = max((h * w for h, w in sizes), default=1)
    coord = torch.zeros(len(sizes), length, 2, dtype=dtype)
    for sample, (h, w) in enumerate(sizes):
        grid = torch.cartesian_prod(torch.arange(h), torch.arange(w)).view(-1, 2)[:length]
        coord[sample, : len(grid)] = grid.to(dtype)
    return coord


@dataclass(kw_only=True)
class Case:
    """One configuration of a table and a batch.

    ``length`` None: as many tokens as the largest grid has.
    """

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
        """timm's module with random tables."""
        newer = {}
        if NEW_TIMM:
            newer["pos_embed_antialias"] = self.antialias
            newer["pos_embed_align_corners"] = self.align_corners
        embeds = NaFlexEmbeds(
            patch_size=1,
            in_chans=1,
            embed_dim=self.channels,
            proj_type="linear",
            class_token=False,
            pos_embed=self.kind,
            pos_embed_grid_size=self.table_size,
            pos_embed_interp_mode=self.mode,
            pos_embed_ar_preserving=self.ar_preserving,
            pos_embed_use_grid_sample=self.use_grid_sample,
            **newer,
        )
        generator = seeded(self.seed)
        for table in tables(embeds):
            table.data.normal_(generator=generator)
        return embeds

    def x(self):
        shape = len(self.sizes), self.length, self.channels
        return torch.randn(shape, generator=seeded(self.seed + 1)).to(self.dtype)

    def coord(self, dtype=torch.int64):
        return row_major(self.sizes, self.length, dtype)

    @property
    def options(self):
        names = "mode", "antialias", "align_corners", "ar_preserving"
        return {name: getattr(self, name) for name in names}

    def spec(self, samples=False):
        if self.kind == "factorized":
            return factorized_spec(self.ar_preserving)
        return learned_spec(*self.options.values(), samples, samples)


BASE = Case(length=21)


def tables(embeds):
    if embeds.pos_embed_type == "learned":
        return [embeds.pos_embed]
    if embeds.pos_embed_type == "factorized":
        return [embeds.pos_embed_y, embeds.pos_embed_x]
    return []


@st.composite
def cases(draw, dtypes=(torch.float32,), largest=40, **fixed):
    """Tables 1..20 x 1..20 (now and then large enough for taps, bicubic ones from 128 on), grids 1..40 x 1..40.

    With repeats and padding, and batches shorter than a grid.
    """
    side = st.integers(1, largest // 2)
    long_side = st.integers(32, 48) | st.just(128) if largest == 40 else side
    table = draw(st.tuples(side, side) | st.tuples(long_side, side) | st.tuples(side, long_side))

    length = st.integers(1, largest)
    few = st.integers(1, 8)
    one = st.just(1)
    grids = [(length, length), (few, few), (one, length), (length, one)]
    grid = st.one_of(st.just(table), *(st.tuples(*sides) for sides in grids))
    distinct = draw(st.lists(grid, min_size=1, max_size=4))
    sizes = draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=6))
    longest = max(h * w for h, w in sizes)
    more = draw(st.sampled_from([0, 0, 3, -1, -longest // 2]))

    options = dict(
        mode=st.sampled_from(["bilinear", "bicubic"]),
        ar_preserving=st.booleans(),
        channels=st.integers(2, 9),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**20),
    )
    if NEW_TIMM:
        options |= dict(antialias=st.booleans(), align_corners=st.booleans())
    values = draw(st.fixed_dictionaries(options))
    values |= dict(table_size=table, sizes=sizes, length=max(1, longest + more))
    return Case(**(values | fixed))


def stock(case, embeds, x, coord):
    """timm's own NaFlex position embedding for this case, in place."""
    suffix = "_grid_sample" if case.use_grid_sample else ""
    STOCK[f"_apply_{case.kind}_naflex_pos_embed{suffix}"](embeds, x, patch_coord=coord)
    return x


def relative(ours, theirs):
    """Largest difference over the largest value."""
    if theirs.numel() == 0:
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    difference = (ours - theirs).abs().max()
    return (difference / theirs.abs().max().clamp(min=1e-12)).item()


def worst(got, want):
    """The largest relative error of a parameter's gradient."""
    assert got.keys() == want.keys()
    errors = []
    for name, grad in want.items():
        if grad.abs().max() > 1e-7:
            errors.append(relative(got[name], grad))
    return max(errors)


def trained(model, batch, run=None):
    """The output of ``run`` (the model itself), and the gradient of each parameter.

    The output's own gradient is random, but fixed. That of its square would do no better than
    rounding: a normalised output has a constant square.
    """
    run = model if run is None else run  # a compiled model has no truth value
    model.zero_grad()
    out = run(batch)
    weight = torch.randn(out.shape, generator=seeded(0)).to(out.device)
    (out * weight).mean().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[name] = parameter.grad.clone()
    return out.detach(), grads


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
    coord = row_major(sizes)
    batch, length, _ = coord.shape
    valid = torch.stack([torch.arange(length) < h * w for h, w in sizes])
    patches = torch.randn(batch, length, patch * patch * chans, generator=seeded(seed))
    patches = patches * valid[..., None]
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}


BATCH = vit_batch([(3, 4), (5, 2), (3, 4), (8, 8), (4, 9)])


def first(out):
    """The tokens that timm's embeddings return: in newer releases with the grid beside them."""
    return out[0] if isinstance(out, tuple) else out


def embeds(model, batch=BATCH):
    return first(model.embeds(batch["patches"], patch_coord=batch["patch_coord"]))


embed = torch.no_grad()(embeds)


def uses(model):
    """Who computes a model's position embeddings.

    Counted while it runs, and its result must be that one's.
    """
    before = calls.call_counts.calls.copy()
    got = embed(model)
    ran = {strategy for (step, strategy) in calls.call_counts.calls - before if step == "pos_embed"}
    (who,) = ran or {"stock"}  # nothing is counted while nothing is patched
    by_timm = STOCK["_apply_learned_naflex_pos_embed"]
    with torch.no_grad():
        want = model.embeds.norm(model.embeds.proj(BATCH["patches"])).clone()
        by_timm(model.embeds, want, patch_coord=BATCH["patch_coord"])
    assert torch.allclose(got, want, atol=1e-5) == (who != "grid_sample")
    assert torch.equal(got, want) or who in ("grid_sample", "matmul")
    return who


def finished_tables():
    """How many resized tables and kernels are kept."""
    return sum(isinstance(part, kept.Frozen) for key in kept._entries for part in key)


def tracer_alone(watcher):
    """``tracing.watcher`` as if no mode watched."""
    return lambda: "tracer" if watcher() == "tracer" else None


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned, in a call that nobody watches."""

    elements = 0

    def __enter__(self):
        self.unwatched = mock.patch.object(tracing, "watcher", tracer_alone(tracing.watcher))
        self.unwatched.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.unwatched.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor) or tensor.dtype is torch.uint8:
                continue  # bytes are the allocator's, on behalf of a product
            elements = tensor._nnz() if tensor.is_sparse else tensor.numel()
            self.elements = max(self.elements, elements)
        return out
