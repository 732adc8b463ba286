"""Python imports this as it starts in the child processes of ``running.children``: each writes down
what ran in it."""

import sys
from pathlib import Path

import wrapt


def watch(_):
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.support.running import watch_a_child

    watch_a_child()


wrapt.register_post_import_hook(watch, "timm_naflex_fast.patching.timm_methods")
