"""Measure what the README and docs/ show, keep it in results/, and write it there. No figure is typed by hand.

uv run tools/update_readme.py                   # measure all again (about a quarter of an hour), then write
uv run tools/update_readme.py --measure speed   # one thing again: see --help; or a part of speed such as speed/siglip
uv run tools/update_readme.py --measure gpu     # what needs a GPU, and is not measured unless named
uv run tools/update_readme.py --render          # write what results/ holds
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import drift_picture
import gpu_speed
import other_speed
import speed
import study
import version_matrix

from timm_naflex_fast.measure.contenders import NAMES
from timm_naflex_fast.measure.drift.report import Report, cells, read, words
from timm_naflex_fast.patching.modes import POS_EMBED

ROOT = Path(__file__).resolve().parent.parent
README, DRIFT = ROOT / "README.md", ROOT / "results" / "drift"


def measure_drift() -> None:
    """Make the digits' and the photos' reports again; each keeps its command, machine, versions and date."""
    held_out = ["examples/drift_report.py"]
    photos = ["-m", "timm_naflex_fast", "drift", "--model", "naflexvit_base_patch16_siglip", "--random-weights"]
    photos += ["--max-seq-len", "64", "256"]
    for name, command in (("digits", held_out), ("photos", photos)):
        out = (DRIFT / name).relative_to(ROOT)
        subprocess.run([sys.executable, *command, "--out", str(out)], check=True, cwd=ROOT)


def render_drift(ways: Iterable[str] = POS_EMBED) -> str:
    """The table of drift on the digits: of this package's strategies, or of all ``ways`` in the report."""
    report = digits()
    lines = [
        "| way | what it is | embedding drift, max abs | relative RMS | pooled cosine distance | same nearest image "
        "| same class as timm | accuracy |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (name for name in report.survey.drift if name in ways):
        lines.append(f"| `{name}` | {words(report, name)} | {' | '.join(cells(report.survey, name))} |")
    made = report.made
    lines += [
        "",
        f"{report.survey.images:,} images; weights: {report.weights}; {made['machine']}; torch {made['torch']}, "
        f"timm {made['timm']}; {made['date']}; `{made['command']}`. Plots and maps: results/drift/digits/report.html.",
    ]
    return "\n".join(lines)


def digits() -> Report:
    """The digits' report."""
    return read(DRIFT / "digits" / "report.json")


SECTIONS = {
    "drift_digits": render_drift,
    "drift_peers": lambda: render_drift(NAMES),
    "training_study": study.render,
    "training_conclusions": study.render_conclusions,
    "speed": speed.render_short,
    "speed_targets": speed.render,
    "patch_embed": other_speed.render_patch_embed,
    "rope": other_speed.render_rope,
    "gpu": gpu_speed.render,
    "versions": version_matrix.render,
    "timm_tests": version_matrix.render_timms_tests,
}
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))


def fill(text: str) -> str:
    """``text`` with what stands between the markers of each section that it has replaced."""
    for name, render in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = head + begin + render() + end + rest.split(end.strip())[1]
    return text


def main() -> None:
    """Measure what the options name, then draw and write."""
    things = ["drift", "speed", *other_speed.PARTS]
    parts = [f"speed/{part}" for part in speed.PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="do not measure again")
    parser.add_argument("--measure", nargs="+", choices=[*things, *parts, "training_study", "gpu"], default=things)
    options = parser.parse_args()
    if not options.render:
        if "drift" in options.measure:
            measure_drift()
        for part in parts:
            if part in options.measure or "speed" in options.measure:
                speed.measure(part.removeprefix("speed/"))
        for part in other_speed.PARTS:
            if part in options.measure:
                other_speed.measure(part)
        if "training_study" in options.measure:
            study.measure()
        if "gpu" in options.measure:
            gpu_speed.measure()
    speed.draw()
    study.redraw()
    drift_picture.draw(digits(), DRIFT / "digits" / "drift.png")
    for page in PAGES:
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    main()
