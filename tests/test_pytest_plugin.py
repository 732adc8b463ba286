"""``pytest -p timm_naflex_fast.pytest_plugin``: another suite runs patched, and timm is as it was afterwards."""

import os
import re

import pytest

import timm_naflex_fast
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
# Before each test, also behind one that leaks, timm is as the suite began.
LEAKS = """
import pytest
from tests.support.oracles import small_vit
from timm_naflex_fast import disable, enable, status

kept = []

@pytest.fixture(scope="module", autouse=True)
def shared():
    with enable("interpolate_cached"):
        yield

@pytest.fixture(autouse=True)
def as_it_began():
    assert status().flags.pos_embed == "interpolate_cached" and status().replaced and not status().models

@pytest.fixture
def tidy():
    with enable("grid_sample"):
        yield

def test_tidy(tidy): assert status().flags.pos_embed == "grid_sample"
def test_leaves_a_mode(): enable("matmul")
def test_leaves_stock(): disable()
def test_a_models_choice_ends_with_it(): enable("grid_sample", model=small_vit())
def test_leaves_a_model():
    kept.append(small_vit())
    enable("grid_sample", model=kept[0])
def test_last(): pass
"""
CACHES = """
from tests.support.oracles import embed, small_vit
from timm_naflex_fast import disable, enable

def test_leaves_tables():
    model = small_vit()
    with enable("matmul"):
        embed(model), embed(model), embed(model)
def test_drops_them():
    test_leaves_tables()
    disable()
"""
ALONE = """
from timm_naflex_fast import disable
def test_leaves_stock(naflex_leaks): disable()
def test_does_not_ask(): disable()
"""


def run(path, *options, workers=0):
    # The last rewrites no asserts, which this process has rewritten already.
    how = f"-c {os.devnull} -p no:cacheprovider -p timm_naflex_fast.pytest_plugin --assert plain".split()
    how += (f"-n {workers} --dist loadfile" if workers else "-p no:xdist").split()
    return pytest.main([*how, "--rootdir", str(path), *options, str(path)])


@pytest.mark.parametrize(
    ("options", "mode", "off"),
    [
        ("--naflex-mode grid-sample", "grid_sample", "enable('stock')"),
        ("", "matmul", "disable()"),
        ("", "matmul", "status()"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_suite_runs_patched_and_ends_with_what_ran(options, mode, off, workers, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "")  # as if nobody had set it
    name = f"test_somebody_elses_{abs(hash((mode, off, workers)))}.py"
    (tmp_path / name).write_text(SUITE.format(mode=mode, off=off))
    assert run(tmp_path, *options.split(), workers=workers) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    times = 3 if off == "status()" else 2
    assert f"pos_embed by {mode} {times} times" in out and ("by interpolate_cached" in out) is False
    said = re.findall(r"switched off or changed by \S+::test_off; 2 of 4 tests", out)
    assert len(said) == (off != "status()"), out
    assert "timm_naflex_fast on timm" in out and "NaFlexEmbeds._apply_learned_naflex_pos_embed " in out
    assert is_pristine()


@pytest.mark.parametrize(("option", "valid"), [("--naflex-mode", "'stock', "), ("--naflex-library", "'timm', ")])
def test_an_unknown_name_is_a_usage_error(option, valid, tmp_path, capsys):
    assert run(tmp_path, option, "vllm") == pytest.ExitCode.USAGE_ERROR
    err = capsys.readouterr().err
    assert "'vllm' is not valid for" in err and f"valid: {valid}" in err and is_pristine()


@pytest.mark.parametrize(
    ("name", "suite", "options", "leaky"),
    [
        ("leaks_matmul", LEAKS, "--naflex-leaks --naflex-mode matmul", ["a_mode", "a_model", "stock"]),
        ("leaks_stock", LEAKS, "--naflex-leaks --naflex-mode stock", ["a_mode", "a_model", "stock"]),
        ("leaks_tables", CACHES, "--naflex-leaks --naflex-mode stock", ["tables"]),
        ("fixture_alone", ALONE, "--naflex-mode matmul", ["stock"]),
    ],
)
def test_the_test_that_leaks_is_the_one_that_fails(name, suite, options, leaky, tmp_path, capsys):
    """And the next ones find timm as the suite began."""
    (tmp_path / f"test_{name}.py").write_text(suite)
    assert run(tmp_path, *options.split()) == pytest.ExitCode.TESTS_FAILED
    out = capsys.readouterr().out
    assert "FAILED" not in out and "replaced methods" not in out, out  # those follow from the settings
    assert ("left the settings for every model" in out) == (suite is not CACHES)
    assert is_pristine() and timm_naflex_fast.status().replaced == {}
    assert sorted(re.findall(r"^ERROR .*::test_(\w+)", out, re.M)) == [f"leaves_{what}" for what in leaky]
