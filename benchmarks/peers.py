"""The peers' own functions, taken from the installed packages without importing what they do not need.

verl and torchrl pull in serving engines and trainers when imported. Their formulas are plain functions, so the
functions are compiled from the installed source, with torch and numpy and each other as their only names.
Nothing is copied: what runs is what is installed.
"""

from __future__ import annotations

import ast
import heapq
import importlib.metadata
import importlib.util
import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Optional, Union

import numpy
import torch

__all__ = [
    "PeerMissingError",
    "extract",
    "torchrl_functions",
    "trl_bin_search",
    "verl_balancing",
    "verl_functions",
    "verl_policy_loss",
    "version",
]


class PeerMissingError(ImportError):
    """The peer is not installed, or has not got the function."""


def version(package: str) -> str:
    """Installed version, for the head of a table."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _source(package: str, module: str) -> Path:
    spec = importlib.util.find_spec(package)  # finds the folder without running it
    if spec is None or not spec.submodule_search_locations:
        raise PeerMissingError(
            f"{package} is not installed. `make setup` installs it without its dependencies (pip install --no-deps)."
        )
    path = Path(next(iter(spec.submodule_search_locations))) / module
    if not path.exists():
        raise PeerMissingError(f"{package} {version(package)} has no {module}.")
    return path


def extract(
    package: str, module: str, names: tuple[str, ...], scope: Mapping[str, Any]
) -> dict[str, Callable[..., Any]]:
    """Compile some functions of an installed module, without decorators from elsewhere.

    Args:
        package: What must be installed.
        module: File inside the package, such as ``"trainer/ppo/core_algos.py"``.
        names: Functions, and whatever of the same file they call.
        scope: Names they see beside each other.

    Raises:
        PeerMissingError: If the package, the file or a function is not there.
    """
    path = _source(package, module)
    found = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    missing = set(names) - {node.name for node in found}
    if missing:
        raise PeerMissingError(
            f"{package} {version(package)} has no {', '.join(sorted(missing))} in {module}."
        )
    for node in found:
        node.decorator_list = [
            one for one in node.decorator_list if isinstance(one, ast.Name) and one.id in names
        ]
        node.returns = None
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
    own: dict[str, Any] = dict(scope)
    exec(compile(ast.Module(body=[*found], type_ignores=[]), str(path), "exec"), own)  # noqa: S102  # installed code
    return {name: own[name] for name in names}


def verl_functions() -> dict[str, Callable[..., Any]]:
    """Advantage estimators of verl by their own names."""
    numeric = {"torch": torch, "np": numpy, "Optional": Optional, "Union": Union, "Any": Any, "math": math}
    helpers = extract(
        "verl",
        "utils/torch_functional.py",
        ("masked_sum", "masked_mean", "masked_var", "masked_whiten"),
        numeric,
    )
    grouped = extract(
        "verl",
        "utils/groupwise.py",
        ("_resolve_device", "_to_1d_numpy_object_array", "as_torch_index", "group_mean_std"),
        {
            **numeric,
            "is_cuda_available": False,
            "get_device_name": lambda: "cpu",
            "is_npu_available": False,
            "os": __import__("os"),
        },
    )
    scope = {
        **numeric,
        **grouped,
        "defaultdict": defaultdict,
        "Enum": Enum,
        "verl_F": type("verl_F", (), {name: staticmethod(one) for name, one in helpers.items()}),
    }
    names = (
        "compute_gae_advantage_return",
        "compute_grpo_outcome_advantage",
        "compute_grpo_vectorized_outcome_advantage",
        "compute_grpo_passk_outcome_advantage",
        "compute_rloo_outcome_advantage",
        "compute_rloo_vectorized_outcome_advantage",
        "compute_opo_outcome_advantage",
        "compute_gpg_outcome_advantage",
        "compute_remax_outcome_advantage",
        "compute_reinforce_plus_plus_outcome_advantage",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "compute_optimal_token_baseline_advantage",
        "compute_gdpo_outcome_advantage",
    )
    return {**extract("verl", "trainer/ppo/core_algos.py", names, scope), **helpers}


def verl_policy_loss() -> Callable[..., tuple[torch.Tensor, dict[str, float]]]:
    """The clipped loss of verl, ``compute_policy_loss_vanilla``."""
    names = ("masked_sum", "masked_mean")
    helpers = extract("verl", "utils/torch_functional.py", names, {"torch": torch})
    scope = {
        "torch": torch,
        "AlgoConfig": type("AlgoConfig", (), {}),
        "verl_F": type("verl_F", (), {name: staticmethod(one) for name, one in helpers.items()}),
    }
    wanted = ("compute_policy_loss_vanilla", "agg_loss")
    return extract("verl", "trainer/ppo/core_algos.py", wanted, scope)[wanted[0]]


def _expand_right(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    # Of tensordict, which is not needed otherwise: more dimensions behind those there are.
    return tensor.reshape(*tensor.shape, *(1,) * (len(shape) - tensor.dim())).expand(shape)


def torchrl_functions() -> dict[str, Callable[..., Any]]:
    """Value functions of torchrl by their own names."""
    shared = extract(
        "torchrl",
        "objectives/value/utils.py",
        (
            "_custom_conv1d",
            "_flatten_batch",
            "_get_num_per_traj",
            "_get_num_per_traj_init",
            "_split_and_pad_sequence",
            "_inv_pad_sequence",
            "_make_gammas_tensor",
        ),
        {"torch": torch, "math": math, "wraps": wraps, "TensorDictBase": (), "expand_right": _expand_right},
    )
    names = (
        "_transpose_time",
        "generalized_advantage_estimate",
        "vec_generalized_advantage_estimate",
        "td_lambda_return_estimate",
        "td_lambda_advantage_estimate",
        "vtrace_advantage_estimate",
        "_fast_vec_gae",
        "_geom_series_like",
    )
    scope = {
        **shared,
        "torch": torch,
        "math": math,
        "warnings": warnings,
        "SHAPE_ERR": "shapes differ",
        "NamedTuple": tuple,
        "wraps": wraps,
        "is_dynamo_compiling": torch.compiler.is_compiling,
    }
    return extract("torchrl", "objectives/value/functional.py", names, scope)


def verl_balancing() -> Callable[[list[int], int, bool], list[list[int]]]:
    """Balancing by verl's ``karmarkar_karp``: costs, parts and whether counts must be equal, to the items of each part."""
    return extract("verl", "utils/seqlen_balancing.py", ("karmarkar_karp",), {"heapq": heapq})[
        "karmarkar_karp"
    ]


def trl_bin_search() -> Callable[[Any, int], list[dict[str, Any]]]:
    """The search of TRL's ``_pack_bfd``, its own statements without those around that move tokens.

    Returns:
        A function of the pairs of length and index, longest first, as a struct array of pyarrow, and of the capacity;
        it gives TRL's bins.
    """
    tree = ast.parse(_source("trl", "data_utils.py").read_text()).body
    parts = {node.name: node for node in tree if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    if not {"_pack_bfd", "_SegmentTree"} <= parts.keys():
        raise PeerMissingError(f"trl {version('trl')} has no _pack_bfd with a _SegmentTree.")
    body = parts["_pack_bfd"].body
    first = [place for place, node in enumerate(body) if "segment_tree" in ast.dump(node)]
    search = ast.parse("def search(lengths, seq_length):\n    return bins").body[0]
    assert isinstance(search, ast.FunctionDef)
    search.body[:0] = body[first[0] : first[-1] + 1]
    module = ast.Module(body=[parts["_SegmentTree"], search], type_ignores=[])
    scope: dict[str, Any] = {"defaultdict": defaultdict, "deque": deque}
    exec(compile(ast.fix_missing_locations(module), "trl._pack_bfd", "exec"), scope)  # noqa: S102  # installed code
    found: Callable[[Any, int], list[dict[str, Any]]] = scope["search"]
    return found
