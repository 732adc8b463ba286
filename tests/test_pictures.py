"""From pictures to the input of an exported model: timm's own patches, in the model's own order."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.naflexvit import NaFlexVitCfg

from tests.support.oracles import seeded, small_vit
from timm_naflex_fast.pictures import patches_of, settings_of


def picture(height, width, mode="RGB"):
    channels = {"RGB": (3,), "L": ()}[mode]
    pixels = torch.randint(256, (height, width, *channels), generator=seeded(0), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy(), mode)


ORDERS = [{}]
if hasattr(NaFlexVitCfg, "patchify_channels_last"):
    ORDERS.append({"patchify_channels_last": False})


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_model_gets_from_patches_what_it_gets_from_the_plain_image(order, channels, mode):
    """A picture that is cut as it is: timm's own model cuts plain images in its own order."""
    model = small_vit(in_chans=channels, patch_size=(4, 8), **order).eval()
    settings = settings_of(model) | {"max_seq_len": "15"}
    image = picture(12, 40, mode)  # 3 x 5 patches

    inputs = patches_of([image], settings)

    pixels = torch.from_numpy(np.array(image)).view(12, 40, channels).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(json.loads(settings[name])) for name in ("mean", "std"))
    plain = (pixels - mean[:, None, None]) / std[:, None, None]
    with torch.no_grad():
        assert torch.allclose(model(inputs), model(plain[None]), atol=1e-5)


@pytest.mark.parametrize(
    ("pictures", "change", "error", "says"),
    [
        (picture(8, 8), {}, TypeError, "a sequence of PIL images"),
        (["photo.jpg"], {}, TypeError, "a sequence of PIL images"),
        ([], {}, ValueError, "one PIL image or more"),
        ([picture(8, 8)], {"max_seq_len": None}, ValueError, "settings lack max_seq_len"),
        ([picture(8, 8)], {"channels": "4"}, ValueError, "takes 4 channels; pictures have 1 or 3"),
    ],
)
def test_what_cannot_be_cut_is_named(pictures, change, error, says):
    settings = settings_of(small_vit(in_chans=3)) | {"max_seq_len": "30"} | change
    settings = {name: text for name, text in settings.items() if text is not None}
    with pytest.raises(error, match=says):
        patches_of(pictures, settings)
