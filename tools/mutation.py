"""Do the fast tests notice when the code of resampling/ and patching/ changes? mutmut changes it, place by place.

uv run --with mutmut tools/mutation.py                   # every mutant, or as many as 40 minutes allow
uv run --with mutmut tools/mutation.py                   # again: goes on where it stopped; changed functions start anew
uv run --with mutmut tools/mutation.py --survivors       # those that survived once more, after tests were added
uv run --with mutmut tools/mutation.py --only "*.tokens.*" --out build/tokens.json

The mutants come in a random order with a fixed seed, so where time ends they are a random sample. The result file says
of how many. A survivor whose change fits an entry of tools/mutation_reasons.json (regular expressions on its name and
on the changed lines) gets the reason from there. The settings are in pyproject.toml; --fresh starts anew.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from version_matrix import made

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results" / "mutation" / "mutation.json"
REASONS = Path(__file__).with_name("mutation_reasons.json")
SEED = 0
SURVIVED, TIMEOUT, NO_TEST = {0}, {-24, 24, 36, 152, 255}, {5, 33}  # mutmut's exit codes; any other is a red test


def results() -> dict[str, int | None]:
    """What mutmut has found so far: exit code by mutant, None if it was not tested."""
    found: dict[str, int | None] = {}
    for file in sorted((ROOT / "mutants").rglob("*.meta")):
        found |= json.loads(file.read_text())["exit_code_by_key"]
    return found


def mutmut(names: list[str], children: int, until: float) -> bool:
    """Let mutmut test these mutants; False if time ended before."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(children), *names]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        status = process.wait(max(until - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # mutmut has saved each result as it came
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return False
    if status:
        raise SystemExit(f"mutmut failed: run it by hand to see why: mutmut run {names[0]!r}")
    return True


def change(name: str) -> list[str]:
    """The lines that a mutant takes away and puts in."""
    from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant

    lines = get_diff_for_mutant(name, path=find_mutant(name).path).splitlines()
    return [f"{line[0]} {line[1:].strip()}" for line in lines if re.match(r"[-+](?![-+])", line)]


def reason(name: str, lines: list[str], reasons: list[dict[str, str]]) -> str | None:
    """Why no test can notice this change, if an entry says so."""
    text = "\n".join(lines)
    fits = (r["reason"] for r in reasons if re.search(r["name"], name) and re.search(r["change"], text))
    return next(fits, None)


def summary(order: list[str], tested: list[str], codes: dict[str, int | None]) -> dict[str, Any]:
    """Counts by room, and each survivor with its reason."""
    reasons = json.loads(REASONS.read_text())
    rooms: dict[str, dict[str, Any]] = {}
    survivors = []
    for name in order:
        zeros = dict.fromkeys(("mutants", "tested", "killed", "timeout", "equivalent", "survived", "no test"), 0)
        rooms.setdefault(name.split(".")[1], zeros)["mutants"] += 1
    for name in sorted(tested):
        room, code = rooms[name.split(".")[1]], codes[name]
        room["tested"] += 1
        if code not in SURVIVED | NO_TEST:
            room["timeout" if code in TIMEOUT else "killed"] += 1
            continue
        lines = change(name)
        why = reason(name, lines, reasons)
        room["equivalent" if why else "survived" if code in SURVIVED else "no test"] += 1
        survivors.append({"mutant": name, "change": lines, "reason": why})
    for room in rooms.values():
        counts = room["tested"] - room["equivalent"]
        room["killed_percent"] = round(100 * (room["killed"] + room["timeout"]) / counts, 1) if counts else None
    survivors.sort(key=lambda survivor: (survivor["reason"] is not None, survivor["mutant"]))
    return {"rooms": rooms, "survivors": survivors}


def main() -> int:
    """Test mutants until all are tested or time is over, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40, help="of testing (40)")
    parser.add_argument("--children", type=int, default=os.cpu_count(), help="tests at the same time (the cores)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="mutants whose names match")
    parser.add_argument("--survivors", action="store_true", help="test those again that survived")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--chunk", type=int, default=800, help="mutants for one start of mutmut (800)")
    parser.add_argument("--out", type=Path, metavar="FILE", default=OUT, help="where to write (results/mutation/)")
    options = parser.parse_args()
    start = time.monotonic()
    until = start + 60 * options.minutes
    if options.fresh:
        shutil.rmtree(ROOT / "mutants", ignore_errors=True)
    # One mutant of each function of the smallest module: mutmut makes all mutants and learns which test runs what.
    mutmut(["timm_naflex_fast.resampling.precision.*__mutmut_1"], options.children, until)
    order = sorted(name for name in results() if fnmatch.fnmatch(name, options.only))
    random.Random(SEED).shuffle(order)
    finished = 0
    while finished < len(order) and time.monotonic() < until:
        part = order[finished : finished + options.chunk]
        codes = results()
        again = SURVIVED | NO_TEST if options.survivors else set()
        todo = [name for name in part if codes[name] is None or codes[name] in again]
        if todo and not mutmut(todo, options.children, until):
            break
        finished += len(part)
        print(f"{finished} of {len(order)} mutants, {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("mutmut", "torch", "timm", "pytest", "hypothesis")}
    record: dict[str, Any] = {**made(), "versions": versions, "seed": SEED, "only": options.only}
    record["seconds_of_this_run"] = round(time.monotonic() - start)
    record |= summary(order, order[:finished], results())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    for name, room in record["rooms"].items():
        print(name, room)
    return 0


if __name__ == "__main__":
    sys.exit(main())
