"""Python imports this as it starts in the child processes of ``witness.children``: each writes down what ran in it."""

import sys
from pathlib import Path

import wrapt


def watch(_):
    tests = Path(__file__).parents[2]
    sys.path += [str(tests / "support"), str(tests.parent / "tools")]
    import witness

    witness.watch_a_child()


wrapt.register_post_import_hook(watch, "timm_naflex_fast.patching.timm")
