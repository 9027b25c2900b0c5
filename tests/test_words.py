"""Words that do not come back are in no page, docstring or message."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.words import WORDS

ROOT = Path(__file__).parent.parent
MADE = {"codes", "errors", "interface", "parts", "things"}  # of the strings of the code


def texts() -> dict[str, str]:
    """The README, the changelog, the pages of the guide, and the strings of the code, by file."""
    guide = [file for file in (ROOT / "examples" / "guide").glob("*.md") if file.stem not in MADE]
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *guide]
    code = [file for folder in ("engine", "handlers") for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)): file.read_text() for file in pages}
    return found | {str(file.relative_to(ROOT)): strings_in(file.read_text()) for file in code}


def strings_in(code: str) -> str:
    parts = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    return "\n".join(part for part in parts if isinstance(part, str))


@pytest.mark.moderate
def test_no_page_docstring_or_message_has_one_of_these_words() -> None:
    found = [
        f"{name}: {text[max(0, one.start() - 30) : one.end() + 30]!r}; write: {instead}"
        for name, text in texts().items()
        for pattern, instead in WORDS.items()
        for one in re.finditer(pattern, text)
    ]
    assert found == []
