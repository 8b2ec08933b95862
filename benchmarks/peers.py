"""The peers' own functions, taken from the installed packages without importing what they do not need.

verl and torchrl pull in serving engines and trainers when imported. Their formulas are plain functions, so the
functions are compiled from the installed source, with torch and numpy and each other as their only names.
Nothing is copied: what runs is what is installed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Optional, Union

import numpy
import torch

__all__ = ["PeerMissingError", "extract", "torchrl_functions", "verl_functions", "version"]


class PeerMissingError(ImportError):
    """The peer is not installed, or has not got the function."""


def version(package: str) -> str:
    """Installed version, for the head of a table."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


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
    spec = importlib.util.find_spec(package)  # finds the folder without running it
    if spec is None or not spec.submodule_search_locations:
        raise PeerMissingError(
            f"{package} is not installed. Install it without its dependencies (pip install --no-deps)."
        )
    path = Path(next(iter(spec.submodule_search_locations))) / module
    if not path.exists():
        raise PeerMissingError(f"{package} {version(package)} has no {module}.")
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
    exec(compile(ast.Module(body=found, type_ignores=[]), str(path), "exec"), own)  # noqa: S102  # installed code
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
