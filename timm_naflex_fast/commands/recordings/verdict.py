"""What a comparison says: in cells of a table, in sentences, and as JSON.

Tests: tests/commands/recordings/test_compare.py.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .compare import Comparison
from .rule import Row

MOST = 5  # pictures are named


def cells(row: Row) -> dict[str, str]:
    """One stage, as text under the table's headings."""
    return {
        "stage": row.stage,
        "measured by": row.measure,
        "difference": f"{row.share:.1e}",
        "limit": f"{row.limit:.1e}",  # inf: not judged
        "pictures beyond it": f"{len(row.parting)} of {row.compared}",
    }


def sentences(found: Comparison) -> list[str]:
    """Which pictures are missing; whether the port is right, or where it parts, and why."""
    said = []
    if found.missing:
        said.append(f"missing: {pictures(found.missing)}; write them, or say --partial")
    first = found.first
    if first is None:
        last = found.rows[-1]
        said.append(
            f"equal within {found.precision}'s rounding, on {last.compared} pictures: {last.stage} "
            f"differs by {last.share:.1e} (limit {last.limit:.1e}, by {last.measure})"
        )
    else:
        said.append(
            f"parts at {first.stage}, in {len(first.parting)} of {first.compared} pictures: "
            f"{first.share:.1e} (limit {first.limit:.1e}, by {first.measure}, {found.precision})"
        )
    reason = found.reason
    if first and reason and reason.known:
        where = f"all {len(first.parting)} pictures that part"
        if len(reason.pictures) < len(first.parting):
            where = (
                f"{len(reason.pictures)} of {len(first.parting)} pictures that part, for the others "
                "its numbers are not recorded"
            )
        said.append(
            f"the likely reason: {reason.words} (it gives the port's numbers, to "
            f"{reason.times:.0%} of the limit, in {where})"
        )
    elif reason:
        said.append(reason.words)
    if found.not_written:
        said.append(f"not written by the port, so not compared: {', '.join(found.not_written)}")
    return said


def pictures(numbers: Sequence[int]) -> str:
    """Pictures by number, the first few of them."""
    named = ", ".join(f"{number:03}" for number in numbers[:MOST])
    more = ", ..." if len(numbers) > MOST else ""
    return f"{len(numbers)} pictures ({named}{more})"


def as_json(found: Comparison) -> dict[str, Any]:
    """The comparison as one JSON object."""
    return {
        "precision": found.precision,
        "first": found.first and found.first.stage,
        "reason": found.reason and asdict(found.reason),
        "missing": list(found.missing),
        "not_compared": list(found.not_written),
        "stages": [asdict(row) for row in found.rows],
        "verdict": sentences(found),
    }
