"""``pytest -p timm_naflex_fast.pytest_plugin``: another suite runs patched, and timm is as it was
afterwards."""

import os
import re

import pytest

from tests.support.oracles import is_pristine

SUITE = """
import timm_naflex_fast
from tests.support.oracles import embed, small_vit
def test_mode():
    assert timm_naflex_fast.status().flags.pos_embed == "{mode}" and timm_naflex_fast.status().replaced
    embed(small_vit())
def test_with_another():
    with timm_naflex_fast.enable("interpolate-cached"): embed(small_vit())
    embed(small_vit())
def test_off(): timm_naflex_fast.{off}
def test_after_it(): embed(small_vit())
"""


def run(path, *options, workers=0):
    # The last rewrites no asserts, which this process has rewritten already.
    how = f"-c {os.devnull} -p no:cacheprovider -p timm_naflex_fast.pytest_plugin --assert plain".split()
    how += (f"-n {workers} --dist loadfile" if workers else "-p no:xdist").split()
    return pytest.main([*how, "--rootdir", str(path), *options, str(path)])


@pytest.mark.parametrize(
    ("options", "mode", "off"),
    [("--naflex-mode grid-sample", "grid_sample", "enable('stock')")]
    + [("", "matmul", "disable()"), ("", "matmul", "status()")],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_suite_runs_patched_and_ends_with_what_ran(
    options, mode, off, workers, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "")  # as if nobody had set it
    name = f"test_somebody_elses_{abs(hash((mode, off, workers)))}.py"
    (tmp_path / name).write_text(SUITE.format(mode=mode, off=off))
    assert run(tmp_path, *options.split(), workers=workers) == 0, capsys.readouterr().out
    out, times = capsys.readouterr().out, 3 if off == "status()" else 2
    assert f"pos_embed by {mode} {times} times" in out and ("by interpolate_cached" in out) is False
    said = re.findall(r"switched off or changed by \S+::test_off; 2 of 4 tests", out)
    assert len(said) == (off != "status()"), out
    assert (
        "timm_naflex_fast on timm" in out and "NaFlexEmbeds._apply_learned_naflex_pos_embed " in out
    )
    assert is_pristine()


@pytest.mark.parametrize(
    ("option", "valid"), [("--naflex-mode", "'stock', "), ("--naflex-library", "'timm', ")]
)
def test_an_unknown_name_is_a_usage_error(option, valid, tmp_path, capsys):
    assert run(tmp_path, option, "vllm") == pytest.ExitCode.USAGE_ERROR
    err = capsys.readouterr().err
    assert "'vllm' is not valid for" in err and f"valid: {valid}" in err and is_pristine()
