"""A measurement ends with sentences that say no more than its noise allows."""

from tests.support.measured import row
from timm_naflex_fast.measure.bench.conclude import conclude


def step(contender, phase, ms, spread=0.01, shares=None, suite="model", rounds=5):
    about = {"model": "m", "embeds_share": shares} if shares else {}
    figures = dict(suite=suite, phase=phase, batch=8, median_ms=ms, spread=spread, about=about, rounds=rounds)
    return row(contender, **figures)


def test_the_closing_sentence_of_a_model():
    shares = {"stock": 0.051, "matmul": 0.011}
    rows = [step("stock", "train", 1000.0, shares=shares), step("matmul", "train", 958.0, 0.034, shares)]
    rows += [step("stock", "infer", 100.0, shares=shares), step("matmul", "infer", 110.6, shares=shares)]
    (said,) = conclude(rows)
    assert said == (
        "On this machine, for m with 8 images (siglip, float32), `matmul` saves 4.2 % of a training step (rounds of "
        "the same code differ by 3.4 %, embeddings 5.1 -> 1.1 % of the step); makes no measurable difference to an "
        "inference (rounds of the same code differ by 1.0 %, embeddings 5.1 -> 1.1 % of the step)."
    )
    (few,) = conclude([step(name, "train", 2.0, None, shares, rounds=1) for name in ("stock", "matmul")])
    assert "no measurable difference to a training step (too few rounds to tell the noise" in few


def test_a_saving_above_timms_own_share_was_disturbed():
    shares = {"stock": 0.296, "matmul": 0.419}
    (said,) = conclude([step("stock", "train", 100.0, shares=shares), step("matmul", "train", 56.4, 0.1, shares)])
    assert "`matmul` was disturbed in a training step (a saving of 43.6 % is more than timm's embeddings take" in said


def test_the_closing_sentences_without_a_model():
    rows = [step("stock", "train", 50.0, suite="pos_embed"), step("matmul", "train", 5.0, 0.03, suite="pos_embed")]
    said, advice = conclude(rows)
    assert "the position embedding with 8 images (siglip, float32), `matmul` saves 90.0 % of a training step" in said
    assert "differ by 3.0 %" in said and "bench --model NAME" in advice
    assert list(conclude(rows[1:])) == [advice] and list(conclude([])) == []
