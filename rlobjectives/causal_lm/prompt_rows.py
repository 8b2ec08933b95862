"""Where prompts come from: a JSONL file, a Hugging Face dataset, or a function."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlobjectives.causal_lm.dotted import import_object
from rlobjectives.errors import CapabilityError, MissingColumnError

__all__ = ["MissingFileError", "PromptSource", "fingerprint", "load_rows"]

PromptSource = str | Sequence[Mapping[str, Any]] | Callable[..., Iterable[Mapping[str, Any]]]
"""A path, a name, rows, or a function that returns rows."""


class MissingFileError(CapabilityError, FileNotFoundError):
    """A file of prompts is not there."""


def load_rows(
    source: PromptSource, *, prompt_column: str, split: str, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Read all rows of a source of prompts.

    Args:
        source: A ``.jsonl`` or ``.json`` file; a folder or a name (with a slash, or without dots) for the
            ``datasets`` library; a dotted path to a function; rows; or a function.
        prompt_column: Column that every row must have.
        split: Split of a Hugging Face dataset.
        options: Keyword arguments of the function, or of ``datasets.load_dataset``.

    Returns:
        The rows, as dictionaries with the same keys.

    Raises:
        MissingFileError: If a file is not there; also a `FileNotFoundError`.
        CapabilityError: If there are no rows, a row is not an object, or a file is not UTF-8 or not JSON; or if there
            are options and nothing that takes them.
        MissingColumnError: If rows differ in their columns, or have no prompt.
    """
    name = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
    rows = [_row(row, position, name) for position, row in enumerate(_read(source, split, options))]
    if not rows:
        raise CapabilityError(f"dataset {name!r} has no rows; expected at least one prompt.")
    if prompt_column not in rows[0]:
        raise MissingColumnError(
            f"dataset {name!r} has no column {prompt_column!r}. It has: {', '.join(rows[0])}. "
            "Rename the column, or set prompt_column."
        )
    for position, row in enumerate(rows):
        missing, extra = rows[0].keys() - row.keys(), row.keys() - rows[0].keys()
        if missing or extra:
            raise MissingColumnError(
                f"dataset {name!r}, row {position} "
                + (
                    f"lacks {', '.join(sorted(map(str, missing)))}, which row 0 has. "
                    if missing
                    else f"has {', '.join(sorted(map(str, extra)))}, which row 0 lacks. "
                )
                + "Give every row the same columns; null says that a value is missing."
            )
    return rows


def fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """A short hash of rows and their order; of values that JSON has no form for, only the type counts.

    Example:
        >>> fingerprint([{"prompt": "a"}, {"prompt": "b"}]) == fingerprint([{"prompt": "b"}, {"prompt": "a"}])
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    # No repr: it may hold an address, which differs between two runs.
    encoder = json.JSONEncoder(skipkeys=True, default=lambda value: type(value).__qualname__)
    for row in rows:
        digest.update(encoder.encode(row).encode() + b"\n")
    return digest.hexdigest()


def _row(row: object, position: int, name: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise CapabilityError(
            f"dataset {name!r}, row {position} is a {type(row).__name__}; expected an object with named columns."
        )
    return dict(row)


def _read(source: PromptSource, split: str, options: Mapping[str, Any]) -> Iterable[object]:
    if callable(source):
        return _called(source, getattr(source, "__name__", type(source).__name__), options)
    path = Path(source) if isinstance(source, str) else None
    if options and (path is None or path.suffix in (".jsonl", ".json")):
        raise CapabilityError(
            f"dataset_options is {dict(options)!r}, but {'rows' if path is None else 'a JSON file'} takes no options. Leave "
            "it out, or give a function or a dataset of the `datasets` library."
        )
    if not isinstance(source, str) or path is None:
        return source
    if path.suffix in (".jsonl", ".json"):
        return _read_json(path)
    dotted = ":" in source or ("." in source and "/" not in source and not path.exists())
    if dotted:
        return _called(import_object(source, "dataset"), source, options)
    return _read_hugging_face(source, split, options)


def _called(function: Any, name: str, options: Mapping[str, Any]) -> Iterable[object]:
    """Rows of a function; one that cannot be called like that is refused before it runs."""
    if not callable(function):
        raise CapabilityError(
            f"dataset {name!r} is a {type(function).__name__}; expected a function that returns rows."
        )
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise CapabilityError(
            f"dataset {name!r} cannot be called with dataset_options {dict(options)}: {error}."
        ) from error
    except ValueError:  # some compiled functions do not tell
        pass
    found: object = function(**options)
    if not isinstance(found, Iterable):
        raise CapabilityError(f"dataset {name!r} returned a {type(found).__name__}; expected rows.")
    return found


def _read_json(path: Path) -> Iterable[object]:
    if not path.is_file():
        raise MissingFileError(f"dataset {str(path)!r} is not a file (working directory: {Path.cwd()}).")
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte-order mark before UTF-8
    except UnicodeDecodeError as error:
        raise CapabilityError(
            f"dataset {str(path)!r} is not UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8."
        ) from error
    if path.suffix == ".json":
        rows = _parse(text, f"dataset {str(path)!r}")
        if not isinstance(rows, list):
            raise CapabilityError(
                f"dataset {str(path)!r} holds a {type(rows).__name__}; expected a list of rows."
            )
        return rows
    # Not splitlines: JSON may hold U+2028 and other line separators of Unicode as they are.
    lines = enumerate(text.split("\n"), start=1)
    return [_parse(line, f"dataset {str(path)!r}, line {number}") for number, line in lines if line.strip()]


def _parse(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise CapabilityError(f"{place} is not JSON: {error}.") from error


def _read_hugging_face(name: str, split: str, options: Mapping[str, Any]) -> Iterable[object]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise CapabilityError(
            f"dataset {name!r} is read with the `datasets` library, which is not installed. "
            "Install it, or give a .jsonl file or a dotted path to a function."
        ) from error
    try:
        if Path(name).is_dir() and (Path(name) / "dataset_info.json").exists():
            return datasets.load_from_disk(name)  # type: ignore[no-any-return]
        return datasets.load_dataset(name, split=split, **options)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise CapabilityError(
            f"dataset {name!r} cannot be read with the `datasets` library: {error} Give a name or folder that it "
            "knows, a .jsonl file, or a dotted path to a function."
        ) from error
