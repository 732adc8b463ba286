"""How far each contender moves a NaFlexVit from timm's own result.

uv run examples/drift_report.py
    on the small model of train_digits.py and its held-out digits at many aspect ratios.
uv run examples/drift_report.py --model naflexvit_base_patch16_siglip.v2_webli
[--checkpoint FILE] [--images DIR]
    on any timm NaFlexVit, and scikit-image's photos or a folder of images. With SigLIP-2's weights
    this draws what tests/siglip2 measures.
Either with --out DIR writes the report with its plots: report.html and report.json.
"""

import argparse
import shlex
import sys

from timm_naflex_fast.commands.cli import checks, drift
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure.models import load_errors


def report(options: argparse.Namespace) -> int:
    options.command = shlex.join(["uv", "run", "examples/drift_report.py", *sys.argv[1:]])
    if options.model:
        return drift.action(options)
    if options.images:
        raise ValueError("--images goes with --model NAME; without it, the digits are measured")
    drift.check(options)
    checks.announce("loading the digits and their model ...")
    import digits  # it imports torch and timm, which takes seconds

    checkpoint = options.checkpoint or digits.CHECKPOINT
    with load_errors(f"the checkpoint {checkpoint}"):
        model = digits.load_model(checkpoint)
    _, _, images, labels = digits.split()
    batches = digits.held_out_batches(images, labels)
    options.model = "digits NaFlexVit"
    drift.measure_and_show(
        model,
        batches,
        len(images) * len(digits.HELD_OUT_GRIDS),
        options,
        source=f"scikit-learn's held-out digits, each in {len(digits.HELD_OUT_GRIDS)} grids",
        weights=f"file {digits.Path(checkpoint).name}, trained by train_digits.py",
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    drift.add_arguments(parser)
    sys.exit(cli.call("drift_report.py", report, parser.parse_args()))
