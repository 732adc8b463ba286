"""The command line itself: it answers at once, and errors are one line with what is valid."""

import ast
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import timm_naflex_fast
from tests.support.oracles import embed, small_vit
from timm_naflex_fast.cli.main import COMMANDS, main

PACKAGE, PICTURES = (
    Path(timm_naflex_fast.__file__).parent,
    Path(__file__).parents[2] / "results" / "drift",
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
# Installed only by those who use it, or brought by torch, torchvision (Pillow, NumPy) and timm
# (tqdm, huggingface_hub).
OPTIONAL = {
    "tqdm",
    "pytest",
    "transformers",
    "triton",
    "torchvision",
    "skimage",
    "PIL",
    "numpy",
    "huggingface_hub",
}
OPTIONAL |= {"onnxruntime", "openvino"}
SMALL = "--model naflexvit_base_patch16_gap --random-weights --model-kwargs embed_dim=32 depth=1 num_heads=2"
WITHOUT_TORCH = """
import sys
from timm_naflex_fast.cli.main import main
for words in {words}:
    try:
        sys.exit(main(words))
    except SystemExit as end:
        code = end.code or 0
    print(words, code, *[name for name in ("torch", "timm", "numpy") if name in sys.modules])
"""


def test_the_package_help_and_wrong_options_import_no_torch():
    right = [
        ["--version"],
        *([*words, "--help"] for words in ([], ["run"], ["identify"], ["bench"], ["drift"])),
    ]
    wrong = [
        ["--nonsense"],
        ["nonsense"],
        [],
        ["--", "info"],
        ["run"],
        ["run", "--mode", "fast", "x.py"],
    ]
    wrong += [["run", "--mode"], ["identify"], ["info", "--fast"]]
    wrong += [
        [command, *words]
        for command in ("bench", "drift")
        for words in (["--fast"], ["--max-seq-len", "many"])
    ]
    code = WITHOUT_TORCH.format(words=right + wrong)
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"^\[.*", out, re.M) == [
        *(f"{words} 0" for words in right),
        *(f"{words} 2" for words in wrong),
    ]
    assert all(re.search(rf"^    {name} ", out, re.M) for name in COMMANDS)  # as the help says


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "bench --contenders nope",
            "--contenders: invalid choice: 'nope' .*stock.*timm-flag-bicubic.*plain-add",
        ),
        ("bench --batch-size 0", "--batch-size: invalid positive value: '0'"),
        (
            "bench --sizes-from . --workload siglip",
            "--workload: not allowed with argument --sizes-from",
        ),
        ("bench --json /", "Is a directory: '/'"),
        (
            "bench --model m --contenders plain-add",
            "plain-add cannot be timed in a whole model; valid: train infer",
        ),
        (
            "bench --model m --phase frozen",
            "frozen cannot be timed in a whole model; valid: train infer stock",
        ),
        ("bench --max-seq-len 4 --workload siglip", "leave out --workload"),
        ("bench --compile", "--compile go with --model NAME"),
        (
            "bench --model vit_relpos_small_patch16_224",
            "'vit_relpos_small_patch16_224' cannot be loaded .TypeError",
        ),
        (
            "bench --model vit_small_r26_s32_224",
            "'vit_small_r26_s32_224' cannot be loaded .TypeError",
        ),
        pytest.param("bench --device cuda", "PyTorch sees no GPU here", marks=no_gpu),
        ("drift", "a model is needed: --model NAME"),
        ("export --out m.onnx", "a model is needed: --model NAME"),
        (
            "export --model naflexvit_base_patch16_gap --out m.bin",
            r"--out must end with .onnx or .pt2; got m.bin",
        ),
        (
            "export --model naflexvit_base_patch16_gap --out no/m.pt2",
            "No such file or directory: 'no/m.pt2'",
        ),
        (
            "export --model resnet18 --out m.pt2",
            "timm has no NaFlexVit 'resnet18'; valid: naflexvit",
        ),
        (f"export {SMALL} --out m.pt2 --size 33 48", "multiple .* 16 x 16"),
        (
            "drift --model naflexvit_base_patch16_gap --random-weights --images /nope",
            "is not a folder",
        ),
        (
            f"drift --model x --checkpoint /nope.pth --images {PICTURES}",
            "no checkpoint at /nope.pth",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_is_done(
    arguments, message, capsys, tmp_path, monkeypatch
):
    """Behind the command's usage, where it names what is valid."""
    monkeypatch.chdir(tmp_path)
    words = arguments.split(" ")
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(words))
    out, err = capsys.readouterr()
    usage, found, line = err.rpartition(f"naflex-fast {words[0]}: ")
    assert out == "" and found and re.search(message, line) and line.count("\n") == 1
    assert usage == "" or (usage.startswith("usage: ") and line.startswith("error: "))
    assert not [*tmp_path.iterdir()]


def test_the_packages_names_are_found_when_asked_for():
    assert sorted(timm_naflex_fast.__all__) == [
        "Handle",
        "disable",
        "enable",
        "functional",
        "status",
    ]
    assert timm_naflex_fast.__getattr__("functional").__name__ == "timm_naflex_fast.functional"
    assert timm_naflex_fast.__getattr__("enable") is timm_naflex_fast.enable and "status" in dir(
        timm_naflex_fast
    )
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        timm_naflex_fast.enabled  # noqa: B018


def test_dependencies_are_what_is_imported():
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported.update(name.split(".")[0] for name in names)
    lines = requires("timm-naflex-fast")
    runtime, extra = (
        {re.match(r"[\w-]+", s)[0] for s in lines if ("extra ==" in s) == more}
        for more in (False, True)
    )
    assert runtime <= imported
    assert (
        imported - {*sys.stdlib_module_names, "timm_naflex_fast", "sitecustomize"} - OPTIONAL
        <= runtime | extra
    )


def test_whatever_stops_a_command_is_one_line_of_text(monkeypatch, capsys):
    for error, status, line in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("a\nb\x1b["), 2, "a\\nb\\x1b["),
    ):
        monkeypatch.setattr("timm_naflex_fast.cli.main.import_module", Mock(side_effect=error))
        assert main(["info"]) == status and capsys.readouterr().err == f"naflex-fast info: {line}\n"


def test_info_says_what_a_report_needs(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "nothing is patched in this process; enable() or naflex-fast run does it" in out
    for name in ("timm-naflex-fast", "timm", "torch", "triton", "python", "CUDA", "caches"):
        assert re.search(rf"^{name} +\S", out, re.M), name
    assert "\nNext: naflex-fast drift --model NAME " in out
    with timm_naflex_fast.enable("interpolate_cached"):
        model = small_vit().requires_grad_(False)
        embed(model), embed(model)
        assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert (
        re.search("_apply_learned_pos_embed +interpolate_cached", out)
        and torch.__version__.split("+")[0] in out
    )
    assert "of 512 MiB cached" in out and "resized tables" in out and " 0 resized tables" not in out


def test_it_and_the_functions_import_no_compiler_and_info_no_timm():
    code = "import sys; from timm_naflex_fast.cli.main import main; main(['info']); assert 'timm' not in sys.modules; "
    code += "import timm_naflex_fast.functional; assert not {'torch._dynamo', 'einx', 'timm'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
