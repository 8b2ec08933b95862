"""Every example of README.md and docs/ runs, and every YAML block parses.

A block that cannot run here (it needs a model, a GPU, a data set) stands under `<!-- skip: the reason -->`.
Python blocks of one page run in order and share their names, as a reader who types them in would have it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import rlobjectives
from rlobjectives import Combined, Component, Estimator, FunctionEstimator, GivenAdvantages, TokenLayout

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if page.exists()]

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*$",
    re.MULTILINE | re.DOTALL,
)
SKIP = re.compile(r"<!--\s*skip:\s*(?P<reason>[^>]*?)\s*-->\s*\Z")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    body: str
    skip: str | None

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        skip = SKIP.search(text[: match.start()])
        found.append(
            Block(
                page,
                text[: match.start("body")].count("\n") + 1,
                match["language"].lower(),
                re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE),
                skip["reason"] if skip else None,
            )
        )
    return found


def of_language(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language in ("python", "py") and block.skip is None:
            # Padded with blank lines, so that a traceback shows the line of the page.
            exec(compile("\n" * (block.line - 1) + block.body, str(page), "exec"), names)


@pytest.mark.parametrize("block", of_language("python", "py"), ids=lambda block: block.place)
def test_python_blocks_parse_and_skips_give_a_reason(block):
    compile(block.body, block.place, "exec")
    assert block.skip is None or len(block.skip) > 8, (
        f"{block.place}: say in the skip comment what the block needs."
    )


@pytest.mark.parametrize("block", of_language("yaml", "yml"), ids=lambda block: block.place)
def test_yaml_blocks_parse(block):
    assert yaml.safe_load(block.body), f"{block.place}: the block is empty."


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}, which do not exist."


def test_the_readme_lists_every_part():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    public = [getattr(rlobjectives, name) for name in rlobjectives.__all__]
    names = {
        part.__name__
        for part in public
        if isinstance(part, type)
        and issubclass(part, (Component, TokenLayout))
        and not part.__abstractmethods__
        and part not in {base for other in public if isinstance(other, type) for base in other.__bases__}
    }
    assert len(names) > 40
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_readme_says_what_an_estimator_gives_a_number_to():
    rows = dict(
        re.findall(
            r"^\| Estimators, (.+?) \| (.*) \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
        )
    )
    assert set(rows) == {"per sequence", "per token", "either"}
    public = [getattr(rlobjectives, name) for name in rlobjectives.__all__]
    for part in public:
        if isinstance(part, type) and issubclass(part, Estimator) and not part.__abstractmethods__:
            fixed = part not in (Combined, FunctionEstimator, GivenAdvantages)
            level = "per token" if part.token_level else "per sequence"
            assert f"`{part.__name__}`" in rows[level if fixed else "either"], part.__name__
