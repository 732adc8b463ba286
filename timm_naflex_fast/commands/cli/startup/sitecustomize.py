"""Python imports this as it starts, in the processes of ``naflex-fast run``.

The user's own sitecustomize comes next. An older Python reads this file too, so it holds nothing
that is new.

Tests: tests/commands/cli/test_run.py.
"""

import os
import sys

sys.path.remove(os.path.dirname(__file__))
try:
    from timm_naflex_fast.commands.cli.run import prepare_process

    prepare_process()
except Exception as problem:
    # An interpreter that cannot import the package stays as it is, unless it is the script's.
    if '"first": true' in os.environ.get("TIMM_NAFLEX_FAST_RUN", ""):
        sys.stderr.write(
            "naflex-fast run: " + sys.executable + " is not prepared: " + str(problem) + "\n"
        )
        sys.stderr.flush()
        os._exit(2)

_ours = sys.modules.pop(__name__)
try:
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401
except ImportError as error:
    if error.name != __name__:
        raise
finally:
    sys.modules.setdefault(__name__, _ours)
