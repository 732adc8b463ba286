"""Make a recording: what a pipeline makes of pictures, stage by stage.

Tests: tests/commands/cli/test_record.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vit_ports.format import VERSION, Array, Recording
from vit_ports.limits import with_limits
from vit_ports.towers.siglip2 import SIGLIP2

from .pipelines import Pictures, Source, Stages


def make_recording(
    source: Source,
    pictures: Pictures,
    names: Sequence[str],
    about: Mapping[str, Any],
    other: Recording | None = None,
) -> Recording:
    """Run pictures through a pipeline, and measure what rounding moves. Mistakes are not run.

    Args:
        source: what is recorded.
        pictures: PIL images in RGB, upright.
        names: of the pictures.
        about: "written_by" and "weights" of recording.json.
        other: a recording of these pictures, from whose grids and pixels the tower goes on.

    Raises:
        ValueError: the other recording has patches of another size.
    """
    embeds = source.model.embeds
    patch_size = embeds.patch_size[0]
    if other is None:
        given: Sequence[Stages] = source.read(pictures)
        # Pixels are (byte / 255 - mean) / std: what is made of black and of white tells both.
        ends = source.read([Image.new("RGB", (64, 64), colour) for colour in ("black", "white")])
        black, white = (own["pixels"][0, :3].astype(np.float64) for own in ends)
        std = 1 / (white - black)
        reading = {"mean": list(-black * std), "std": list(std), "filter": source.filter}
    else:
        theirs = other.about["patch_size"]
        if theirs != patch_size:
            raise ValueError(f"its patches have a side of {theirs}, the model's of {patch_size}")
        given = other.stages
        reading = {key: other.about[key] for key in ("mean", "std", "filter")}
    stages = source.tower(given)
    described = []
    for number, (name, picture, own) in enumerate(zip(names, pictures, stages)):
        described.append(
            {
                "file": f"pictures/{number:03}.png",
                "name": name,
                "size": [picture.height, picture.width],
                "grid": own["grid"].tolist(),
            }
        )
    table: Array = embeds.pos_embed[0].detach().numpy()  # (H0, W0, C)
    written = {
        "format": "naflex-recording",
        "version": VERSION,
        **about,
        "patch_size": patch_size,
        "table_size": list(table.shape[:2]),
        "max_patches": source.max_patches,
        "heads": source.model.blocks[0].attn.num_heads,
        **reading,
        "pictures": described,
        "mistakes": [],
        "mistakes_tried": 0,
    }
    return with_limits(SIGLIP2, Recording(written, stages, table, {}), source.tower)
