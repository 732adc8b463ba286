"""Measure what the README and docs/ show, keep it in results/, and write it there. No figure is typed by hand.

uv run tools/update_readme.py                   # measure all again (about a quarter of an hour), then write
uv run tools/update_readme.py --measure speed   # one thing again: see --help; or a part of speed such as speed/siglip
uv run tools/update_readme.py --measure gpu     # what needs a GPU, and is not measured unless named
uv run tools/update_readme.py --render          # write what results/ holds
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu_speed
import other_speed
import speed
import timm
import torch

ROOT = Path(__file__).resolve().parent.parent
README, RESULT = ROOT / "README.md", ROOT / "results" / "drift_digits.json"


def measure_drift() -> None:
    """Run the README's main command and keep its figures with the machine, versions and date."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        subprocess.run([sys.executable, str(ROOT / "examples/drift_report.py"), "--json", str(out)], check=True)
        report = json.loads(out.read_text())
    record = {
        "command": "uv run examples/drift_report.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "report": report,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def render_drift() -> str:
    """The README's drift table, from the result file."""
    record = json.loads(RESULT.read_text())
    report = record["report"]
    lines = [
        "| mode | embedding drift, max abs | relative RMS | pooled cosine distance | same class as timm | accuracy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, drift in report["strategies"].items():
        numbers = (f"{drift[key]:.1e}" for key in ("embed_max_abs", "embed_rel_rms", "pooled_cosine_distance"))
        shares = (f"{100 * drift[key]:.2f} %" for key in ("agreement", "accuracy"))
        lines.append(f"| `{name}` | {' | '.join(numbers)} | {' | '.join(shares)} |")
    lines += [
        "",
        f"{report['images']:,} images; weights: {report['weights']}; {record['machine']}; torch {record['torch']}, "
        f"timm {record['timm']}; {record['date']}; `{record['command']}`.",
    ]
    return "\n".join(lines)


SECTIONS = {
    "drift_digits": render_drift,
    "speed": speed.render_short,
    "speed_targets": speed.render,
    "patch_embed": other_speed.render_patch_embed,
    "rope": other_speed.render_rope,
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
    parser.add_argument("--measure", nargs="+", choices=[*things, *parts, "gpu"], default=things)
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
        if "gpu" in options.measure:
            gpu_speed.measure()
    speed.draw()
    for page in PAGES:
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    main()
