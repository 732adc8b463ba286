"""Local weights in the forms in which people have them, under timm's names.

Two libraries have a SigLIP-2 image tower in PyTorch: timm, whose tower open_clip holds, too; and
transformers. Google's own file timm itself reads.
"""

import re
from pathlib import Path

from .tower_names import from_transformers
from .weight_files import Tensors, read_tensors

# How the name of each library's patch embedding ends; what stands before it stands before all names
# of the tower. timm's are those of a NaFlexVit and of a ViT; open_clip holds timm's tower.
TRANSFORMERS = "embeddings.patch_embedding.weight"
PATCH_EMBEDDING = re.compile(rf"(.*?)(?:{TRANSFORMERS}|embeds.proj.weight|patch_embed.proj.weight)")


def read_checkpoint(file: Path) -> Tensors:
    """Read weights in timm's or transformers' form.

    Args:
        file: as :func:`find_weights` gives it.

    Returns:
        The tensors of the image tower under timm's names.

    Raises:
        ValueError: two towers; or one of transformers that lacks tensors or has others than Siglip2,
            counted and named. A file that is damaged raises what its reader raises.
    """
    tensors = read_tensors(file)
    found = [match[1] for match in map(PATCH_EMBEDDING.fullmatch, tensors) if match]
    if not found:
        return tensors
    if len(found) > 1:
        raise ValueError(f"{len(found)} image towers in one file ({', '.join(found)})")
    prefix = found[0]
    tower = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    if TRANSFORMERS in tower:
        return from_transformers(tower)
    return tower
