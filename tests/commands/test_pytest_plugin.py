"""``pytest -p timm_naflex_fast.pytest_plugin``: another suite runs patched, and timm is as it was afterwards."""

import os

import pytest
from oracles import is_pristine

SUITE = """
import timm_naflex_fast
def test_mode():
    assert timm_naflex_fast.status().flags.pos_embed == "{mode}" and timm_naflex_fast.status().replaced
"""


def run(path, *options):
    # The last rewrites no asserts, which this process has rewritten already.
    how = ["-c", os.devnull, "--rootdir", str(path), "-p", "no:cacheprovider", "--assert", "plain"]
    return pytest.main([*how, "-p", "timm_naflex_fast.pytest_plugin", *options, str(path)])


@pytest.mark.parametrize(("options", "mode"), [(["--naflex-mode", "grid-sample"], "grid_sample"), ([], "matmul")])
def test_a_suite_runs_patched(options, mode, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TIMM_NAFLEX_FAST_MODE", raising=False)
    (tmp_path / f"test_somebody_elses_{mode}.py").write_text(SUITE.format(mode=mode))
    assert run(tmp_path, *options) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "timm_naflex_fast on timm" in out and "NaFlexEmbeds._apply_learned_naflex_pos_embed" in out
    assert is_pristine()


def test_an_unknown_mode_is_a_usage_error(tmp_path, capsys):
    assert run(tmp_path, "--naflex-mode", "fast") == pytest.ExitCode.USAGE_ERROR
    assert "mode='fast' is not a strategy; valid: 'stock'" in capsys.readouterr().err
    assert is_pristine()
