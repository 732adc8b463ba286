"""``status()`` tells what is replaced, what ran since ``enable()``, and what a user may not
expect."""

import gc
import re

import pytest
import timm
from torch import nn

from tests.support.oracles import embed, is_pristine, small_vit
from timm_naflex_fast import disable, enable, status

pytestmark = pytest.mark.usefixtures("clean")


def test_each_enable_counts_what_ran_since():
    model = small_vit()
    first = enable()
    assert re.match(
        r"timm_naflex_fast on timm \d.*, torch \d.*\n\nreplaced +by\n",
        str(status()),
    )
    assert "\n\nwhat ran since enable()  calls\n(nothing yet)                0" in str(status())
    embed(model)
    assert "pos_embed: matmul            1" in str(status())
    with enable("interpolate_cached"):
        embed(model)
        assert status().calls == {("pos_embed", "interpolate_cached"): 1}
    assert status().calls == {("pos_embed", "matmul"): 1}
    enable("grid_sample"), embed(model), first.restore()
    disable(model), embed(model)
    assert status().calls == {("pos_embed", "grid_sample"): 1, ("pos_embed", "stock"): 1}
    disable()
    assert status().calls == {}
    assert str(status()).splitlines()[2].startswith("nothing is replaced: enable() patches timm")


def test_a_model_with_its_own_code_again_or_gone_needs_no_replacement():
    for end in (disable, lambda model: enable("stock")):
        model = small_vit()
        enable("matmul", model=model)
        assert not is_pristine()
        end(model)
        assert is_pristine() == (end is disable)
    del model
    gc.collect()
    for _ in range(2):  # to ask changes nothing
        assert status().replaced == {}
        assert not is_pristine()
    disable()
    assert is_pristine()


@pytest.mark.parametrize("mode", ["grid_sample", "stock"])
def test_enable_says_in_one_line_what_it_replaces(mode, caplog):
    model = small_vit()
    caplog.set_level("INFO", "timm_naflex_fast")
    # Older timm has no rotary embeddings, so nothing is replaced in NaFlexVit itself.
    for own, where in ((None, "every model"), (model, r"the modules \[('', )?'embeds'\]")):
        caplog.clear()
        enable(mode, model=own)
        (line,) = caplog.messages
        assert re.match(rf"in {where}: {{'timm': {{'NaFlexEmbeds._apply", line)
        for name, who in status(model).replaced.items():
            assert f"'{name}': '{who}'" in line


def test_the_status_of_one_model():
    model = small_vit()
    other = small_vit()
    both = nn.ModuleList([model, other])
    name = "NaFlexEmbeds._apply_learned_naflex_pos_embed"
    enable("interpolate_cached", patch_embed="stock"), enable("matmul", model=model)
    assert status(model).flags.pos_embed == status(model).replaced[name] == "matmul"
    assert status(other).flags.pos_embed == status(other).replaced[name] == "interpolate_cached"
    assert [own.pos_embed for own in status().models] == ["matmul"]
    own = "one model has its own: pos_embed by matmul, patch_embed by matmul, rope by batched"
    assert f"\n{own}\n" in str(status())
    assert re.search(rf"{name} +interpolate_cached\n{name}_grid_sample +stock\n", str(status()))
    enable("stock", model=model)
    assert "one model has its own: the library's own code" in str(status())
    assert status(both).replaced[name] == "interpolate_cached, stock"
    with pytest.raises(ValueError, match="Linear contains no timm NaFlexEmbeds"):
        status(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("version", "notes"), [("1.0.28", 2), ("1.0.29", 1), ("1.0.30.dev0", 1), ("1.0.30", 0)]
)
def test_what_an_older_timm_does_otherwise_is_named(version, notes, monkeypatch):
    said = ("SigLIP-2's position table by bicubic", "a function, which is not replaced")
    enable()
    monkeypatch.setattr(timm, "__version__", version)
    for now in (status(), status(small_vit())):
        assert [words in str(now) for words in said] == [notes > 0, notes > 1]
