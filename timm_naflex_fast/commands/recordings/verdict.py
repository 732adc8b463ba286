"""What a comparison says: in cells of a table, in sentences, and as JSON.

Tests: tests/commands/recordings/test_compare.py.
"""

from dataclasses import asdict
from typing import Any

from .compare import Comparison, Row


def cells(row: Row) -> dict[str, str]:
    """One stage, as text under the table's headings."""
    return {
        "stage": row.stage,
        "largest difference": f"{row.largest:.2g}",
        "RMS difference": f"{row.rms:.2g}",
        "largest number": f"{row.scale:.3g}",
        "share": f"{row.share:.1e}",
        "limit": f"{row.limit:.1e}",  # inf: not judged
        "pictures beyond it": f"{len(row.parting)} of {row.compared}",
    }


def sentences(found: Comparison) -> list[str]:
    """Whether the port is right, on how many pictures, in which precision; and the reason."""
    said = []
    first = found.first
    if first is None:
        last = found.rows[-1]
        said.append(
            f"equal within {found.precision}'s rounding, on {found.pictures} pictures: {last.stage} "
            f"differs by {last.share:.1e} of its largest number (limit {last.limit:.1e})"
        )
    else:
        said.append(
            f"parts at {first.stage}, in {len(first.parting)} of {first.compared} pictures: "
            f"{first.share:.1e} of the largest number (limit {first.limit:.1e}, {found.precision})"
        )
    reason = found.reason
    if reason and reason.known:
        said.append(
            f"the likely reason: {reason.words} (that gives the port's numbers to "
            f"{reason.error:.1e}, picture {reason.picture:03}; limit {reason.limit:.1e})"
        )
    elif reason:
        said.append(f"the kind of difference: {reason.words}")
    if found.missing:
        said.append(f"not written by the port, so not compared: {', '.join(found.missing)}")
    return said


def as_json(found: Comparison) -> dict[str, Any]:
    """The comparison as one JSON object."""
    return {
        "pictures": found.pictures,
        "precision": found.precision,
        "first": found.first and found.first.stage,
        "reasons": [asdict(found.reason)] if found.reason else [],
        "not_compared": list(found.missing),
        "stages": [asdict(row) for row in found.rows],
        "verdict": sentences(found),
    }
