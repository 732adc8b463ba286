"""``naflex-fast info``."""

import re
import subprocess
import sys

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
    assert "\nNext: naflex-fast drift --model NAME " in out
    with enable("interpolate_cached"):
        model = small_vit().requires_grad_(False)
        embed(model), embed(model)
        assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert re.search("_apply_learned_pos_embed +interpolate_cached", out) and torch.__version__.split("+")[0] in out
    assert "of 512 MiB cached" in out and "resized tables" in out and " 0 resized tables" not in out


def test_it_and_the_functions_import_no_compiler_and_info_no_timm():
    code = "import sys; from timm_naflex_fast.cli.main import main; main(['info']); assert 'timm' not in sys.modules; "
    code += "import timm_naflex_fast.functional; assert not {'torch._dynamo', 'einx', 'timm'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
