"""Python imports this as it starts, in the processes of ``naflex-fast run``; the user's sitecustomize comes next."""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _folder]
try:
    from timm_naflex_fast.cli.run import prepare_process
except ImportError as problem:  # another Python, without this package
    if '"first": true' in os.environ.get("TIMM_NAFLEX_FAST_RUN", ""):
        sys.stderr.write(f"naflex-fast: timm is not patched: {sys.executable}: {problem}\n")
else:
    prepare_process()

_ours = sys.modules.pop(__name__)
try:
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401
except ImportError as error:
    if error.name != __name__:
        raise
finally:
    sys.modules.setdefault(__name__, _ours)
