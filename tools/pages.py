"""Write what the pages take from results/: see pages/__init__.py, which this file runs."""

import sys

# The folder: where both have a name, Python imports a folder with __init__.py, never this file.
from pages import main

if __name__ == "__main__":
    sys.exit(main())
