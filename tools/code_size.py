"""Lines of code of the package, without comments, docstrings and blank lines: uv run tools/code_size.py [FOLDER]."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def code_lines(source: str) -> int:
    """How many lines hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*LAYOUT, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print each file's lines, each room's, and all."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "timm_naflex_fast"
    sizes = {path: code_lines(path.read_text()) for path in sorted(root.rglob("*.py"))}
    rooms: dict[str, int] = {}
    for path, size in sizes.items():
        print(f"{size:5} {path.relative_to(root)}")
        parts = path.relative_to(root).parts
        rooms[parts[0] if len(parts) > 1 else "(top)"] = rooms.get(parts[0] if len(parts) > 1 else "(top)", 0) + size
    print("\n".join(f"{size:5} {room}/" for room, size in rooms.items()))
    print(f"{sum(rooms.values()):5} in all")


if __name__ == "__main__":
    main()
