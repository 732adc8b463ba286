"""``python -m timm_naflex_fast`` is the command ``naflex-fast``."""

from .commands.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
