"""Redraw the pictures of the guide: run the code of the page that shows them, and keep what it draws.

python examples/guide/pictures.py [FOLDER]
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch

GUIDE = Path(__file__).parent
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]+\]\(pictures/([\w.]+)\)")


def main(kept: Path) -> None:
    """Run the page in a temporary folder and keep its pictures."""
    torch.set_num_threads(1)
    page = (GUIDE / "pictures.md").read_text(encoding="utf-8")
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            names: dict[str, object] = {}
            for code in FENCE.findall(page):
                exec(compile(code, "pictures.md", "exec"), names)
        finally:
            os.chdir(before)
        kept.mkdir(parents=True, exist_ok=True)
        for name in PICTURE.findall(page):
            shutil.copy(Path(folder, name), kept / name)
            print(kept / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GUIDE / "pictures")
