"""Put the table of options into docs/coming_from_trl.md: python tools/trl_docs.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rlobjectives.integrations.trl.options import markdown  # noqa: E402  # found on the path just set

PAGE = ROOT / "docs" / "coming_from_trl.md"
TABLE = re.compile(r"\| option \| \|.*?\n\n", re.DOTALL)


def main() -> None:
    """Replace the table in place."""
    text = PAGE.read_text(encoding="utf-8")
    if len(TABLE.findall(text)) != 1:
        sys.exit(f"{PAGE} should hold one table of options.")
    PAGE.write_text(TABLE.sub(lambda _: f"{markdown()}\n\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
