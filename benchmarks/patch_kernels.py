"""Races on patch-kernel resampling: this package, the installed timm, and the forms of timm issue 2514.

``python -m timm_naflex_fast.bench.patch_kernels [PHASE ...]`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...resampling.frozen import frozen_kernel, kernels
from ...resampling.patch_kernels import (
    axis_inverse,
    factors,
    prewarm_factors,
    resample_linear_kernel,
    resample_patch_kernel,
)
from .race import BASELINE, FLOOR, Contender, Race, run

Size = tuple[int, int]

SIZES: tuple[tuple[Size, Size], ...] = (
    ((32, 32), (16, 16)),
    ((16, 16), (32, 32)),
    ((16, 16), (48, 48)),
    ((16, 16), (12, 12)),
    ((16, 16), (8, 8)),
    ((16, 16), (14, 20)),
)
LAYOUTS = ("linear", "conv")  # (O, H*W*I), as NaFlexVit's weights are, and (O, I, H, W)
PHASES = ("train", "2514", "first", "matrices", "frozen")
EMBED_DIM, IN_CHANS = 768, 3


def races(
    sizes: Iterable[tuple[Size, Size]] = SIZES,
    layouts: Iterable[str] = LAYOUTS,
    phases: Iterable[str] = PHASES,
    device: torch.device | str = "cpu",
) -> Iterator[Race]:
    """One race per size pair, layout and phase, on a float32 kernel of 768 x 3 channels.

    Phases: "train" is forward and backward at a size met before, and "2514" the same with the issue's forms (a race of
    their own, because their temporaries leave cold caches to whoever runs next); "first" the forward at a new size, and
    "matrices" what of it is new, computed alone; "frozen" a forward without gradients at a size and with a weight met
    before. Made as they are asked for: a race holds its tensors.
    """
    phases = tuple(phases)
    make = {"train": _train, "2514": _issue_2514, "first": _first, "matrices": _matrices, "frozen": _frozen}
    unknown = {*phases} - {*make}
    if unknown:
        raise ValueError(f"phases={sorted(unknown)} do not exist; valid: {', '.join(map(repr, make))}")
    for old, new in sizes:
        for layout in layouts:
            forms = Forms(old, new, layout, torch.device(device))
            for phase in phases:
                yield Race(
                    suite="patch_embed",
                    workload=f"{_name(old)}->{_name(new)} {layout}",
                    phase=phase,
                    batch=0,
                    dtype="float32",
                    contenders=tuple(make[phase](forms)),
                    about={"layout": layout, "old": _name(old), "new": _name(new)},
                )


def _name(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def apply_vmap(kernels: Tensor, inverse: Tensor, new: Size) -> Tensor:
    """Kernels (O, I, H, W) to (O, I, h, w) by one product per kernel, vectorised with vmap: timm before PR 2518.

    ``inverse``: pinv(R^T) (h*w, H*W). Source: the form that timm issue 2514 quotes.
    """

    def one(kernel: Tensor) -> Tensor:
        return (inverse @ kernel.reshape(-1)).reshape(new)

    return torch.vmap(torch.vmap(one))(kernels.float()).to(kernels.dtype)


def inverse_2d(old: Size, new: Size, device: torch.device) -> Tensor:
    """pinv(R^T) (h*w, H*W) by one SVD, as timm does on every call (before PR 2721) or once per size (since)."""
    basis = torch.eye(old[0] * old[1], device=device).reshape(-1, 1, *old)
    resized = torch.nn.functional.interpolate(basis, size=new, mode="bicubic", antialias=True, align_corners=False)
    return torch.linalg.pinv(resized.flatten(1))


class Forms:
    """The ways to resample one kernel, all functions of the weight alone."""

    def __init__(self, old: Size, new: Size, layout: str, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        linear = layout == "linear"
        shape = (EMBED_DIM, old[0] * old[1] * IN_CHANS) if linear else (EMBED_DIM, IN_CHANS, *old)
        self.old, self.new, self.linear, self.device = old, new, linear, device
        self.weight = torch.randn(shape, generator=generator).to(device).requires_grad_()
        self.matmul: Callable[[Tensor], Tensor]
        if linear:
            self.matmul = partial(resample_linear_kernel, old=old, size=new, in_chans=IN_CHANS)
        else:
            self.matmul = partial(resample_patch_kernel, size=new)
        self.upstream = torch.randn_like(self.matmul(self.weight.detach()))
        self._inverse: Tensor | None = None

    def new_interpolator(self, _: object = None) -> Any:
        """timm's own module, without any matrix in its cache."""
        from timm.layers.patch_embed import PatchEmbedInterpolator

        return PatchEmbedInterpolator(self.old, in_chans=IN_CHANS, embed_dim=EMBED_DIM)

    def stock(self, interpolator: Any, weight: Tensor) -> Tensor:
        """timm's own result."""
        resample = interpolator.resample_linear_weight if self.linear else interpolator.resample_conv_weight
        return resample(weight, self.new)

    def vmap(self, weight: Tensor, *, uncached: bool = False) -> Tensor:
        """Issue 2514's form with a matrix at hand, or ``uncached`` as timm then called it: a new SVD each time."""
        if uncached or self._inverse is None:
            self._inverse = inverse_2d(self.old, self.new, self.device)
        kernels = weight.view(EMBED_DIM, *self.old, IN_CHANS).permute(0, 3, 1, 2) if self.linear else weight
        out = apply_vmap(kernels, self._inverse, self.new)
        return out.permute(0, 2, 3, 1).flatten(1) if self.linear else out

    def floor(self, weight: Tensor) -> Tensor:
        """The bytes that any form must touch: the weight read, the result written."""
        weight.sum()
        return torch.empty_like(self.upstream).zero_()

    def step(self, resample: Callable[[Tensor], Tensor], _: object = None) -> None:
        """Forward and backward."""
        self.weight.grad = None
        resample(self.weight).backward(self.upstream)


def _train(forms: Forms) -> Iterator[Contender]:
    def floor(_: object) -> None:
        forms.floor(forms.weight.detach())
        forms.upstream.sum()
        torch.empty_like(forms.weight).detach().zero_()

    yield Contender(BASELINE, partial(forms.step, partial(forms.stock, forms.new_interpolator())))
    yield Contender("matmul", partial(forms.step, forms.matmul))
    yield Contender(FLOOR, floor)


def _issue_2514(forms: Forms) -> Iterator[Contender]:
    yield Contender(BASELINE, partial(forms.step, partial(forms.stock, forms.new_interpolator())))
    yield Contender("matmul", partial(forms.step, forms.matmul))
    yield Contender("vmap", partial(forms.step, forms.vmap))
    yield Contender("vmap, SVD each call", partial(forms.step, partial(forms.vmap, uncached=True)))


def _forget() -> None:
    factors.cache_clear()
    axis_inverse.cache_clear()


def _matrices(forms: Forms) -> Iterator[Contender]:
    def ours(_: object) -> None:
        prewarm_factors(forms.old, forms.new, "bicubic", True, IN_CHANS if forms.linear else 1, forms.device)

    yield Contender(BASELINE, lambda _: inverse_2d(forms.old, forms.new, forms.device))
    yield Contender("matmul", ours, _forget)


def _first(forms: Forms) -> Iterator[Contender]:
    weight = forms.weight.detach()

    yield Contender(BASELINE, lambda interpolator: forms.stock(interpolator, weight), forms.new_interpolator)
    yield Contender("matmul", lambda _: forms.matmul(weight), _forget)
    yield Contender(FLOOR, lambda _: forms.floor(weight))


def _frozen(forms: Forms) -> Iterator[Contender]:
    interpolator, weight = forms.new_interpolator(), forms.weight.detach()

    def kept(_: object) -> Tensor:
        return frozen_kernel(weight, forms.new, None, lambda weight, _: forms.matmul(weight))

    yield Contender(BASELINE, lambda _: forms.stock(interpolator, weight))
    yield Contender("matmul, kept", kept)
    yield Contender("matmul, computed anew", lambda _: forms.matmul(weight))
    yield Contender(FLOOR, lambda _: forms.floor(weight))


def main(phases: Iterable[str] = PHASES) -> None:
    """Print the races of these phases: medians, and how many times faster than timm."""
    for race in races(phases=phases):
        kernels.clear()
        for row in run(race, 3 if race.phase == "2514" else 15):
            times = "" if row.times_faster is None else f"{row.times_faster:7.1f} x"
            print(f"{row.workload:22} {row.phase:8} {row.contender:21} {row.median_ms:9.3f} ms {times}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or PHASES)
