"""``naflex-fast info``."""

import re

import torch

from tests.support.oracles import embed, small_vit
from timm_naflex_fast import enable
from timm_naflex_fast.cli.main import main


def test_info_says_what_a_report_needs(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "nothing is patched in this process; enable() or naflex-fast run does it" in out
    for name in ("timm-naflex-fast", "timm", "torch", "triton", "python", "CUDA", "caches"):
        assert re.search(rf"^{name} +\S", out, re.M), name
    with enable("interpolate_cached"):
        model = small_vit().requires_grad_(False)
        embed(model), embed(model)
        assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "timm: position embeddings  interpolate_cached" in out and torch.__version__.split("+")[0] in out
    assert "of 512 MiB cached" in out and "resized tables" in out and " 0 resized tables" not in out
