"""What a comparison says: in cells of a table, in sentences, and as JSON.

Tests: tests/commands/recordings/test_compare.py.
"""

from dataclasses import asdict
from typing import Any

from .compare import Comparison
from .rule import Row


def cells(row: Row) -> dict[str, str]:
    """One stage, as text under the table's headings."""
    return {
        "stage": row.stage,
        "measured by": row.measure,
        "difference": f"{row.share:.1e}",
        "limit": f"{row.limit:.1e}",
        "pictures beyond it": f"{len(row.parting)} of {row.compared}",
    }


def sentences(found: Comparison) -> list[str]:
    """Which pictures are missing; whether the port is right, or where it parts, and why."""
    said = []
    if found.missing:
        said.append(
            f"missing: {len(found.missing)} pictures, the first is {found.missing[0]:03}; write them, "
            "or say --partial"
        )
    first = found.first
    reason = found.reason
    if first and reason:
        count = len(first.parting)
        said.append(
            f"parts at {first.stage}, in {count} of {first.compared} pictures: {first.share:.1e} "
            f"(limit {first.limit:.1e}, by {first.measure}, {found.precision})"
        )
        words = reason.words
        if reason.known:
            words = (
                f"the likely reason: {words} (checked in {len(reason.pictures)} of the {count} pictures "
                f"that part: it gives the port's numbers, to {reason.times:.0%} of the limit)"
            )
        said.append(words)
    else:
        last = found.rows[-1]
        noise = f"{found.precision}'s rounding"
        if last.moved:
            noise = (
                f"what its own pixels move (they differ by up to {last.moved:.2f} grey levels; small "
                "mistakes hide behind that, so compare again, from the recorded pixels)"
            )
        said.append(
            f"equal within {noise}, on {last.compared} pictures: {last.stage} differs by "
            f"{last.share:.1e} (limit {last.limit:.1e}, by {last.measure})"
        )
    if found.not_written:
        said.append(f"not written by the port, so not compared: {', '.join(found.not_written)}")
    return said


def as_json(found: Comparison) -> dict[str, Any]:
    """The comparison as one JSON object."""
    return {
        "precision": found.precision,
        "first": found.first and found.first.stage,
        "reason": found.reason and asdict(found.reason),
        "missing": found.missing,
        "not_compared": found.not_written,
        "stages": [asdict(row) for row in found.rows],
        "verdict": sentences(found),
    }
