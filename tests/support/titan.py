"""torchtitan's two loops in words of our own, under the names and arguments of its release 0.3.0.

Where torchtitan is installed, ``tests/patching/test_torchtitan.py`` compares them with its own.
"""

import torch
import torch.nn.functional as F

__version__ = "0.3.0"


def _slices(out, grids, embeddings):
    """Fill a padded batch image by image, a video's frames one after the other; equal grids are resized once."""
    made = {}
    for image, (t, h, w) in enumerate(grids):
        if (h, w) not in made:
            made[h, w] = embeddings(h, w)
        out[image, : t * h * w] = made[h, w].repeat(t, 1)
    return out


class Qwen:
    """models/qwen3_5/vision_encoder.py"""

    def _compute_learned_pos_embeds(
        learned_pos_embed, grids, max_num_patch, num_grid_per_side, spatial_merge_size, dim
    ):
        square = learned_pos_embed.view(num_grid_per_side, num_grid_per_side, dim).permute(2, 0, 1)[None].float()

        def embeddings(h, w):
            m = spatial_merge_size
            resized = F.interpolate(square, size=(h, w), mode="bilinear", align_corners=True)[0]
            blocks = resized.reshape(dim, h // m, m, w // m, m).permute(1, 3, 2, 4, 0)
            return blocks.reshape(h * w, dim).to(learned_pos_embed.dtype)

        return _slices(learned_pos_embed.new_zeros(len(grids), max_num_patch, dim), grids, embeddings)


class Kimi:
    """models/kimi_k2_7/vision_encoder.py"""

    def _get_temporal_pos_embed(num_frames, embed_dim, *, base=10000.0, device=None):
        speed = base ** -(torch.arange(embed_dim // 2, device=device) / (embed_dim / 2))
        angle = torch.arange(num_frames, device=device)[:, None] * speed
        return torch.cat((angle.sin(), angle.cos()), 1)

    def _compute_learned_pos_embeds(pos_embed, grids, max_num_patch, interpolation_mode):
        rows, columns, dim = pos_embed.shape

        def embeddings(h, w):
            if (h, w) == (rows, columns):
                return pos_embed.flatten(0, 1)
            resized = F.interpolate(pos_embed.permute(2, 0, 1)[None].float(), size=(h, w), mode=interpolation_mode)
            return resized[0].permute(1, 2, 0).flatten(0, 1).to(pos_embed.dtype)

        out = _slices(pos_embed.new_zeros(len(grids), max_num_patch, dim), grids, embeddings)
        times = torch.zeros_like(out)
        for image, (t, h, w) in zip(times, grids):
            time = Kimi._get_temporal_pos_embed(t, dim, device=out.device) if t > 1 else torch.zeros(t, dim)
            image[: t * h * w] = time.repeat_interleave(h * w, 0)
        return out + times
