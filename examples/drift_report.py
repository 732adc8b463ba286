"""How far each strategy moves a NaFlexVit from timm's own result.

uv run examples/drift_report.py
    on the small model of train_digits.py and its held-out digits at many aspect ratios.
uv run examples/drift_report.py --model naflexvit_base_patch16_siglip.v2_webli --images DIR [--checkpoint FILE]
    on any timm NaFlexVit and a folder of images.
"""

import argparse
import sys

import digits

from timm_naflex_fast import cli
from timm_naflex_fast.drift import measure, print_table, track, write_json


def report(options: argparse.Namespace) -> int:
    if options.model:
        return cli.drift(options)
    if options.images:
        raise ValueError("--images goes with --model NAME; without both, the digits are measured")
    checkpoint = options.checkpoint or digits.CHECKPOINT
    model = digits.load_model(checkpoint)
    _, _, images, labels = digits.split()
    batches = list(digits.held_out_batches(images, labels))
    about = dict(model="digits NaFlexVit", weights=f"file {digits.Path(checkpoint).name}, trained by train_digits.py")
    count, results = measure(model, track(batches, "measuring", len(batches)), options.strategies)
    print_table(results, **about, images=count)
    if options.json:
        write_json(options.json, results, **about, images=count)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_model_arguments(parser)
    sys.exit(cli.run("drift_report.py", report, parser.parse_args()))
