"""Whole checkpoints, judged by what was noted when they were written and by their own checksums."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlobjectives.integrations.checkpoint_files import finish, mark, trouble_with
from rlobjectives.integrations.whole_files import replacing, write_text
from tests.integrations.damage import flip_a_bit

LARGE = 5_000_000
"""Numbers whose archive is not read back at once: 20 MB."""


@pytest.fixture
def no_checksums() -> Iterator[None]:
    """PyTorch writes archives without them, which saves time."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("numbers", [10, LARGE])
@pytest.mark.parametrize("turned_on_again", [False, True])
def test_archives_without_checksums_are_whole_and_their_damage_in_a_folder_is_found(
    numbers: int, turned_on_again: bool, tmp_path: Path, no_checksums: None
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save({"weights": torch.zeros(numbers)}, folder / "weights.pt")
    mark(folder)
    torch.serialization.set_crc32_options(turned_on_again)
    assert trouble_with(folder / "weights.pt") == ""
    assert trouble_with(folder) == ""
    flip_a_bit(folder / "weights.pt")
    assert "'weights.pt'" in trouble_with(folder)


def test_a_marker_holds_under_another_choice_of_checksums(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(LARGE)}, tmp_path / "weights.pt")
    mark(tmp_path)
    torch.serialization.set_crc32_options(False)
    try:
        assert trouble_with(tmp_path) == ""
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o002, 0o664), (0o022, 0o644)])
def test_files_are_as_open_to_others_as_the_umask_says(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "note.txt", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "note.txt").stat().st_mode) == mode


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "note.ckpt"
    path.write_text("old")
    with pytest.raises(KeyError), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert [one.name for one in tmp_path.iterdir()] == ["note.ckpt"]
    assert path.read_text() == "old"
    with replacing(path, keep_suffix=True) as temporary:
        assert temporary.suffix == ".ckpt"
        temporary.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("marks", [mark, finish])
def test_a_folder_with_nothing_in_it_is_not_marked_whole(made: bool, marks: object, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if made:
        folder.mkdir()
    with pytest.raises(FileNotFoundError, match="holds no file"):
        marks(folder)
    assert folder.exists() == made
