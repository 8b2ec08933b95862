"""A built-in part is one file and one line of its room's face; pages, lists and laws find it by themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PART = '''"""Half of what a token mean gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.reductions.base import LossReduction, inverse

__all__ = ["HalfMean"]


@dataclass(frozen=True, kw_only=True)
class HalfMean(LossReduction):
    """Half of the mean over tokens.

    Example:
        >>> HalfMean()
        HalfMean()
    """

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """``1 / (2 · T)`` for each sequence."""
        return 0.5 * inverse(context.tokens).expand(layout.num_sequences)
'''

TRY = """
import rlobjectives
from rlobjectives import GRPO, HalfMean, Objective
from rlobjectives.testing import check_part

assert rlobjectives.__file__.startswith({root!r}), rlobjectives.__file__
check_part(HalfMean()).raise_if_failed()
assert Objective(estimator=GRPO(), reduction="HalfMean").reduction == HalfMean()
"""


def test_two_files_make_a_part(tmp_path: Path) -> None:
    for folder in ("rlobjectives", "tools", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "rlobjectives/reductions/half_mean.py").write_text(PART, encoding="utf-8")
    face = tmp_path / "rlobjectives/reductions/__init__.py"
    text = face.read_text(encoding="utf-8")
    text = text.replace(
        "__all__ = [",
        'from rlobjectives.reductions.half_mean import HalfMean\n\n__all__ = [\n    "HalfMean",',
    )
    face.write_text(text, encoding="utf-8")

    def run(*arguments: str) -> None:
        found = subprocess.run(  # this interpreter
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stderr[-3000:]

    run("-c", TRY.format(root=str(tmp_path)))
    run("tools/parts_table.py")
    assert "`HalfMean`" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "`HalfMean`" in (tmp_path / "docs/parts.md").read_text(encoding="utf-8")
