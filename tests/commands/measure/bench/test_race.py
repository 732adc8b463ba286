"""The figures of a race, by hand, and its table."""

import math
import re

import pytest

from tests.support.measured import row
from timm_naflex_fast.commands.measure.bench.race import print_race, rows


def test_medians_and_ratios():
    times = {"stock": [8.0], "matmul": [1.0, 4.0, 2.0]}
    found = rows({"suite": "model"}, times)
    figures = [(one["contender"], one["median_ms"], one["times_faster"]) for one in found]
    assert figures == [("stock", 8000, 1), ("matmul", 2000, 4)]
    assert [one["rounds"] for one in found] == [1, 3]
    assert found[0]["suite"] == "model"
    (alone,) = rows({}, {"matmul": [1.0]})
    assert math.isnan(alone["times_faster"])


@pytest.mark.parametrize(
    ("rounds", "median", "low", "high"),
    # Of ten rounds the fastest and the slowest are left out: the second to the ninth hold the
    # median in 98 % of cases.
    [(3, 2000, 1000, 3000), (10, 5500, 2000, 9000)],
)
def test_the_range_of_the_median(rounds, median, low, high):
    (one,) = rows({}, {"matmul": [*range(1, rounds + 1)]})
    assert (one["median_ms"], one["low_ms"], one["high_ms"]) == (median, low, high)


def shown(capsys, *found):
    """The title and, cell by cell, the lines of the table that is printed."""
    print_race(found)
    title, *lines = capsys.readouterr().out.strip().split("\n")
    return title, [re.split(" {2,}", line) for line in lines]


def test_the_table_has_columns_for_what_was_measured(capsys):
    title, lines = shown(capsys, row(counted={"matmul": {"graphs": 0}}))
    assert title == "model siglip train, B=64, float32, tiny, cpu"
    assert lines == [["mode", "median ms", "rounds", "graphs"], ["matmul", "10.0", "5", "0"]]


@pytest.mark.parametrize(
    ("timms", "ours", "share", "rounds", "says"),
    [
        (50.0, 5.0, 0.03, 5, "10.0 (9.42 to 10.6)"),
        (100.0, 60.0, 0.3, 5, "cannot be told (0.897 to 3.10)"),
        (2.0, 1.0, 0.0, 2, "cannot be told (too few rounds)"),
    ],
)
def test_a_ratio_is_told_only_where_the_ranges_of_the_medians_are_apart(
    timms, ours, share, rounds, says, capsys
):
    def measured(name, ms):
        limits = dict(low_ms=ms * (1 - share), high_ms=ms * (1 + share))
        return row(name, median_ms=ms, rounds=rounds, **limits)

    _, lines = shown(capsys, measured("stock", timms), measured("matmul", ours))
    headings, *cells = lines
    assert headings[-1] == "times faster than stock"
    assert [line[-1] for line in cells] == ["-", says]
