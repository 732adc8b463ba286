"""A measurement ends with sentences that say no more than its noise allows."""

from tests.support.measured import row
from timm_naflex_fast.measure.bench.conclude import conclude


def steps(phase, timms, ours, spread=0.01, shares=(0.051, 0.011), rounds=5):
    about = {"model": "m", "embeds_share": dict(zip(("stock", "matmul"), shares))} if shares else {}
    more = dict(phase=phase, batch=8, about=about, rounds=rounds)
    return row("stock", median_ms=timms, spread=spread and 0.01, **more), row(median_ms=ours, spread=spread, **more)


def test_the_closing_sentence_of_a_model():
    (said,) = conclude([*steps("train", 1000.0, 958.0, 0.034), *steps("infer", 100.0, 110.6)])
    assert said == (
        "On this machine, for m with 8 images (siglip, float32), `matmul` saves 4.2 % of a training step (rounds of "
        "the same code differ by 3.4 %, embeddings 5.1 -> 1.1 % of the step); makes no measurable difference to an "
        "inference (rounds of the same code differ by 1.0 %, embeddings 5.1 -> 1.1 % of the step)."
    )
    (said,) = conclude(steps("train", 2.0, 2.0, None, rounds=1))
    assert "no measurable difference to a training step (too few rounds to tell the noise" in said
    (said,) = conclude(steps("train", 100.0, 56.4, 0.1, (0.296, 0.419)))
    assert "`matmul` was disturbed in a training step (a saving of 43.6 % is more than timm's embeddings take" in said


def test_the_closing_sentences_without_a_model():
    rows = steps("train", 50.0, 5.0, 0.03, None)
    said, advice = conclude(rows)
    assert "the position embedding with 8 images (siglip, float32), `matmul` saves 90.0 % of a training step" in said
    assert "differ by 3.0 %" in said and "bench --model NAME" in advice
    assert list(conclude(rows[1:])) == [advice] and list(conclude([])) == []
