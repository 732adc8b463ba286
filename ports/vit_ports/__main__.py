"""``python -m vit_ports`` is the command ``vit-ports``."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
