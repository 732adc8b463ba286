"""Write the tables and plots of the README and docs/ from results/: uv run tools/update_readme.py.

No figure is typed by hand. benchmarks/measure.py measures, and examples/drift_report.py, examples/training_study.py
and tools/version_matrix.py do. Each result file holds the command that made it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import api_page
import drift_picture
import speed_tables
import study
import version_matrix

from timm_naflex_fast.measure.contenders import BASELINE, CONTENDERS
from timm_naflex_fast.measure.drift.report import cells, columns
from timm_naflex_fast.measure.drift.survey import Drift

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import other_libraries  # noqa: E402
import plots  # noqa: E402

README, DRIFT, SPEED = ROOT / "README.md", ROOT / "results" / "drift", ROOT / "results" / "speed"


def drift_report(name: str) -> dict[str, Any]:
    """One of the committed report.json."""
    return json.loads((DRIFT / name / "report.json").read_text())


def render_drift() -> str:
    """The table of drift on the digits."""
    report = drift_report("digits")
    found = {name: Drift(**one) for name, one in report["survey"]["drift"].items()}
    headings = columns(found[BASELINE])
    lines = ([f"`{name}`", CONTENDERS[name], *cells(one, headings)] for name, one in found.items())
    table = speed_tables.markdown(["contender", "what it is", *headings.values()], lines)
    made = report["made"]
    about = (
        f"{report['survey']['images']:,} images; weights: {report['weights']}; {made['machine']}; "
        f"torch {made['torch']}, timm {made['timm']}; {made['date']}; `{made['command']}`. "
        "Plots and maps: results/drift/digits/report.html."
    )
    return "\n".join([*table, "", about])


def render_drift_sentence() -> str:
    """How far grid_sample moves embeddings: on the digits, and on photos at SigLIP-2's usual number of tokens."""
    parts = []
    for found in (drift_report(name)["survey"] for name in ("digits", "photos")):
        shrinks = [one["shrink"] for one in found["grids"]]
        parts.append((min(shrinks), max(shrinks), 100 * found["drift"]["grid_sample"]["embed_rel_rms"]))
    few, usual = parts
    return (
        f"The digits' grids shrink the table {few[0]:.1f} to {few[1]:.1f} times, and `grid_sample` moves their "
        f"embeddings by {few[2]:.1f} %.\nPhotos at SigLIP-2's 256 tokens shrink it at most {usual[1]:.1f} times, and "
        f"`grid_sample` moves embeddings by {usual[2]:.1f} % (stand-in weights)."
    )


SECTIONS = {
    "drift_sentence": render_drift_sentence,
    "drift_peers": render_drift,
    "training_study": study.render,
    "training_conclusions": study.render_conclusions,
    "speed": speed_tables.render_short,
    "speed_targets": speed_tables.render_targets,
    "model": speed_tables.render_model,
    "model_short": speed_tables.render_model_short,
    "heap": speed_tables.render_heap,
    "counts": speed_tables.render_counts,
    "counts_short": speed_tables.render_counts_short,
    "patch_embed": speed_tables.render_patch_kernels,
    "rope": speed_tables.render_rope,
    "gpu": speed_tables.render_gpu,
    "api": api_page.render,
    "other_libraries": other_libraries.render,
    "versions": version_matrix.render,
    "timm_tests": version_matrix.render_timms_tests,
}
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))


def fill(text: str) -> str:
    """``text`` with what is between the markers of each of its sections replaced."""
    for name, render in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = head + begin + render() + end + rest.split(end.strip())[1]
    return text


def draw() -> None:
    """The plots that the pages show."""
    over_batch = speed_tables.rows("speed/batches_*")
    compared = speed_tables.rows(*speed_tables.TARGETED, *speed_tables.OTHERS)
    if over_batch:
        plots.time_over_batch(over_batch, SPEED / "time_over_batch.png")
    if compared:
        plots.times_faster([row for row in compared if row.contender in plots.FEW], SPEED / "times_faster.png")
    study.redraw()
    drift_picture.draw(drift_report("digits"), DRIFT / "digits" / "drift.png")


if __name__ == "__main__":
    draw()
    for page in PAGES:
        page.write_text(fill(page.read_text()))
