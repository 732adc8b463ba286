"""The package's page in an index, which hatchling makes from README.md as it builds.

The page does not lie in this repository, so README's links into it get the repository's address:

SOURCE_URL=https://... uv build

This address also becomes the links "Source" and "Changelog". Without it, as in ``pip install .``, the
links into the repository become plain words.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link, but to another place or into the page itself.
LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)")


class PackagePage(MetadataHookInterface):
    """Adds the page and the links to the package's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them; hatchling calls this."""
        source = os.environ.get("SOURCE_URL", "").rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": page(readme, source)}
        if source:
            metadata["urls"]["Source"] = source
            metadata["urls"]["Changelog"] = f"{source}/blob/HEAD/CHANGELOG.md"


def page(readme: str, source: str) -> str:
    """README's text with the address ``source`` in each link into the repository.

    Without an address (""), such links become plain words.
    """
    if not source:
        return LINK.sub(r"\1", readme)
    return LINK.sub(rf"[\1]({source}/blob/HEAD/\2)", readme)
