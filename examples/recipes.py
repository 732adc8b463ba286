"""Functions for torchtitan, vLLM and SGLang, in place of their loops that resample position tables.

Each takes the arguments of what it replaces, in torchtitan 0.3.0, vLLM 0.33.0 and SGLang 0.5.23,
and is tested against such a loop, with gradients. None has been run within these libraries.

- qwen3_5, kimi_k2_7: ``_compute_learned_pos_embeds`` of torchtitan's
  ``models/{qwen3_5,kimi_k2_7}/vision_encoder.py``. Assign it to the module's name in every process,
  before training starts. If the table is a replicated ``DTensor``, give ``table.to_local()``, and
  hand on ``DTensor.from_local(cells, table.device_mesh)``.
- siglip2_packed: the static method
  ``Siglip2VisionEmbeddings.resize_positional_embeddings_packed`` of vLLM's ``lfm2_siglip2.py`` and
  SGLang's ``siglip2.py``.
- isaac: ``Siglip2VariableSequenceEmbeddings.positional_embeddings`` of vLLM's ``isaac.py``.
- moonvit: ``Learnable2DInterpPosEmb.get_pos_embeds`` of vLLM's ``moonvit.py`` (Kimi-VL).
- kimi_k25: ``Learnable2DInterpPosEmbDivided_fixed.get_pos_embeds`` of vLLM's ``kimi_k25_vit.py``. In
  SGLang's ``kimi_k25.py``, ``forward`` adds this to ``x``.
- ovis: the loop in ``Siglip2VisionEmbeddings.forward`` of vLLM's ``siglip2navit.py`` (Ovis2.5), for a
  table (H0, W0, C).

Servers start processes of their own, and a patch must be in each: where one was left out, results
became worse without an error. Both servers load entry points in each process. So copy what you need
into a package of your own, with ``vllm`` and ``sglang`` below, and name them in its pyproject.toml:

    [project.entry-points."vllm.general_plugins"]
    naflex = "my_recipes:vllm"
    [project.entry-points."sglang.srt.plugins"]
    naflex = "my_recipes:sglang"

vLLM then prints one line for the engine and for each worker, SGLang "Applied 1 hook(s) to ..." in
each scheduler. If a plugin fails, both log this and serve without it. If ``VLLM_PLUGINS`` or
``SGLANG_PLUGINS`` is set, it must name the plugin.
"""

import os

import torch

from timm_naflex_fast.functional import resample_pos_embeds


def qwen3_5(learned_pos_embed, grids, max_num_patch, num_grid_per_side, spatial_merge_size, dim):
    return resample_pos_embeds(
        learned_pos_embed.view(num_grid_per_side, num_grid_per_side, dim),
        grids,
        mode="bilinear",
        antialias=False,
        align_corners=True,
        merge=spatial_merge_size,
        length=max_num_patch,
    )


def kimi_k2_7(pos_embed, grids, max_num_patch, interpolation_mode):
    cells = resample_pos_embeds(
        pos_embed, grids, mode=interpolation_mode, antialias=False, length=max_num_patch
    )
    if all(t == 1 for t, _, _ in grids):
        return cells
    from torchtitan.models.kimi_k2_7.vision_encoder import _get_temporal_pos_embed

    # Each frame of a video adds an embedding of its time.
    times = torch.zeros_like(cells)
    for image, (t, h, w) in zip(times, grids):
        if t > 1:
            frames = _get_temporal_pos_embed(t, cells.shape[-1], device=cells.device)
            image[: t * h * w] = frames.repeat_interleave(h * w, 0)
    return cells + times


def siglip2_packed(table, spatial_shapes, lengths_list):
    return resample_pos_embeds(
        table, [(h, w) for h, w in spatial_shapes.tolist() if h * w], mode="bilinear"
    )


def isaac(self, packed_seq_patches):
    table = self.position_embedding.weight.unflatten(0, (self.position_embedding_size, -1))
    return resample_pos_embeds(table, packed_seq_patches[2], mode="bilinear")


def moonvit(self, grid_hws_list):
    return resample_pos_embeds(
        self.weight, grid_hws_list, mode=self.interpolation_mode, antialias=False
    )


def kimi_k25(self, grid_thws):
    sizes = grid_thws if isinstance(grid_thws, list) else grid_thws.tolist()
    cells = resample_pos_embeds(self.weight, sizes, mode=self.interpolation_mode, antialias=False)
    if all(t == 1 for t, _, _ in sizes):
        return cells
    times = [self.time_weight[:t].expand(t, h * w, -1).flatten(0, 1) * (t > 1) for t, h, w in sizes]
    return cells + torch.cat(times)


def ovis(table, grid_thws, hidden_stride=2):
    return resample_pos_embeds(
        table, grid_thws, mode="bicubic", antialias=False, merge=hidden_stride
    )


def vllm():
    from vllm.model_executor.models.lfm2_siglip2 import Siglip2VisionEmbeddings as Embeddings

    Embeddings.resize_positional_embeddings_packed = staticmethod(siglip2_packed)
    print("siglip2_packed is on in process", os.getpid(), flush=True)


def sglang():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    name = "sglang.srt.models.siglip2.Siglip2VisionEmbeddings.resize_positional_embeddings_packed"
    HookRegistry.register(name, siglip2_packed, HookType.REPLACE)


if __name__ == "__main__":
    print(__doc__)
