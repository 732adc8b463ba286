"""Tables of text."""

from timm_naflex_fast.text_table import table


def test_figures_stand_to_the_right_and_words_to_the_left():
    lines = [{"who": "stock", "ms": "1", "saved": "1.0 %"}, {"who": "us", "ms": "234", "saved": "noise", "more": "< 5"}]
    assert table(lines).splitlines() == [
        "who     ms  saved  more",
        "stock    1  1.0 %     -",
        "us     234  noise   < 5",
    ]
