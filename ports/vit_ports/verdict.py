"""What a comparison says: in cells of a table, in sentences, and as JSON.

Tests: ports/tests/test_compare.py.
"""

from dataclasses import asdict
from typing import Any

from .compare import Comparison
from .rule import Row

OK = "✓ ok"
PARTS = "✗ parts"


def cells(row: Row) -> dict[str, str]:
    """One stage, as text under the table's headings."""
    return {
        "": PARTS if row.parting else OK,
        "stage": row.stage,
        "measured by": row.measure,
        "difference": f"{row.share:.1e}",
        "limit": f"{row.limit:.1e}",
        "pictures that part": f"{len(row.parting)} of {row.compared}",
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
    decided = first or found.rows[-1]
    if first and reason:
        count = len(first.parting)
        beyond = "" if first.share > first.limit else "beyond two thirds of "
        said.append(
            f"parts at {first.stage}, in {count} of {first.compared} pictures: {first.share:.1e} "
            f"({beyond}the recording's limit {first.limit:.1e}, by {first.measure}, {found.precision})"
        )
        words = reason.words
        if reason.known:
            words = (
                f"the likely reason: {words} (it gives the port's numbers in all "
                f"{len(reason.pictures)} pictures checked)"
            )
        said.append(words)
    else:
        noise = f"{found.precision}'s rounding"
        if decided.moved:
            noise = "what its own pixels move"
        said.append(
            f"equal within {noise}, on {decided.compared} pictures: {decided.stage} differs by "
            f"{decided.share:.1e} (the recording's limit {decided.limit:.1e}, by {decided.measure})"
        )
    if decided.moved:
        said.append(
            f"its own pixels differ by up to {decided.moved:.2g} grey levels, so the limits are wider, "
            "and smaller mistakes hide: compare again, from the recorded pixels"
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
