"""What a timed step of a whole model is."""

import pytest
import torch

import timm_naflex_fast
from tests.support import oracles
from tests.support.running import ran
from timm_naflex_fast.commands.measure.bench import model as of_model
from timm_naflex_fast.commands.measure.models import load_model

ROUNDS = 3


def small_model(**more):
    more |= dict(embed_dim=32, depth=1, num_heads=2)
    return load_model("naflexvit_base_patch16_gap", random_weights=True, **more)[0]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(of_model, "ROUNDS", ROUNDS)
    return small_model(num_classes=1000)


def measure(model, *names, dtype="float32", phase="infer"):
    return of_model.race_eager(
        model, names, device="cpu", dtype=dtype, phase=phase, lengths=[64], images=2
    )


@ran("matmul")
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_contenders_run_whole_steps_of_one_model_in_turns(tiny, phase):
    forward = tiny.embeds.forward
    seen = []  # the mode of each forward

    def watched(*args, **kwargs):
        (own,) = timm_naflex_fast.status().models
        seen.append(own.pos_embed)
        assert oracles.is_pristine() is (own.pos_embed == "stock")
        return forward(*args, **kwargs)

    tiny.embeds.forward = watched
    before = tiny.embeds.pos_embed.detach().clone()
    assert [*measure(tiny, "stock", "matmul", phase=phase)] == ["stock", "matmul"]
    assert len(seen) == 8  # a warm-up and three rounds of each
    assert all({*turn} == {"stock", "matmul"} for turn in zip(seen[::2], seen[1::2]))
    assert torch.equal(tiny.embeds.pos_embed, before) is (phase == "infer")  # AdamW stepped
    assert tiny.training is (phase == "train")


def test_bfloat16_runs_under_autocast(tiny):
    autocast = []
    tiny.blocks[0].register_forward_hook(
        lambda *_: autocast.append(torch.is_autocast_enabled("cpu"))
    )
    measure(tiny, "stock", dtype="bfloat16")
    measure(tiny, "stock", dtype="float32")
    assert autocast == [True] * (ROUNDS + 1) + [False] * (ROUNDS + 1)
