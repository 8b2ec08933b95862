"""Wrong configurations without end: seeded mutations of a right one, as YAML text and as command-line options."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

LONG = "x" * 5000
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2**70, -(2**70), 0.0, -0.5, 1.5, 1e400, -1e400, float("nan"), 1e-300, 10**400,
    "", " ", "0", "1", "-1", "1e-3", "4e-4", "nan", "inf", "null", "true", "auto", "gdpo", "GRPO", "reference", LONG, "ü🙂\u2028",
    "a.b.c", "os.system", "builtins.eval", "builtins.dict", "torch.nn.Linear", "/", ".", "..", "/dev/null", "no/such/file.jsonl", "run.yaml",
    "http://127.0.0.1:9/x", "-", "--", "=", "{", "[", "a: b", "${HOME}", "!!python/object:os.system",
    [], [None], [1, 2], ["a"], [[]], [True], [1.0, "x"], list(range(3000)), {}, {"a": 1}, {1: 2}, {None: None}, {"": ""},
    {"class_path": None}, {"class_path": 3}, {"class_path": "GRPO"}, {"class_path": "GRPO", "init_args": None},
    {"class_path": "GRPO", "init_args": {"scale": "none", "more": 1}}, {"class_path": "builtins.eval"},
    {"class_path": "builtins.dict", "init_args": {"a": 1}}, {"init_args": {}}, {"class_path": "TokenMean", "dict_kwargs": {"x": 1}},
    {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}, {"class_path": "os.system", "init_args": {}},
    {"class_path": "rlobjectives.Nothing"}, {"class_path": "CausalLMPolicy"}, {"name": "gdpo"}, {"class_path": "A" * 3000},
]  # fmt: skip
OBJECTIVES: list[Any] = [
    "gdpo", "grpo", "dapo", "gspo", "p3o", "m2po", "dr_grpo", "reinforce", "ppo", "kl_cov",
    {"estimator": {"class_path": "GRPO", "init_args": {"scale": "none", "epsilon": 1e-4}}, "entropy_coef": 0.01},
    {"estimator": {"class_path": "GDPO", "init_args": {"weights": [1.0, 0.5]}},
     "policy_loss": {"class_path": "ClippedSurrogate", "init_args": {"clip_low": 0.2, "clip_high": 0.28, "ratio_cap": 3.0}},
     "reduction": {"class_path": "FixedBudget", "init_args": {"max_tokens": 64}}},
    {"estimator": {"class_path": "RLOO"}, "policy_loss": {"class_path": "Reinforce"}, "reduction": {"class_path": "SequenceMean"}},
    {"estimator": {"class_path": "GRPO"}, "kl": {"coef": 0.1, "estimator": "k3"}, "entropy_mask": {"fraction": 0.2}},
    {"estimator": {"class_path": "GRPO"}, "policy_loss": {"class_path": "GSPO", "init_args": {"clip_low": 3e-4}},
     "off_policy_mask": {"threshold": 0.5}},
    {"estimator": {"class_path": "GRPO"}, "correction": {"weight": "token", "high": 2.0, "reject": [{"over": "sum", "high": 2.0}]}},
    {"estimator": {"class_path": "GRPO"}, "policy_loss": {"class_path": "CISPO"}, "reduction": {"class_path": "SequenceSum"}},
]  # fmt: skip
TRAINER: dict[str, list[Any]] = {
    "strategy": ["ddp", "deepspeed_stage_3", "deepspeed_stage_9", "fsdp", "ddp_spawn", "dp", "single_device", "xla", "model_parallel", ["ddp"]],
    "accelerator": ["gpu", "cuda", "tpu", "mps", "cpu", "hpu", "gpuu", ["cpu"], 3],
    "devices": [0, -1, 2, 99, "auto", "0", "2", "cpu", [0], [0, 0], [], 1.5, "1,2", "a,b", True, {"a": 1}],
    "max_steps": [None, -1, 0, 2, "two", 1.5, 2**70, -2], "max_epochs": [None, -1, 0, -5, "x"],
    "precision": ["16", "bf16-mixed", "8", 32, "float", None], "num_nodes": [0, -1, 2, "two"],
    "val_check_interval": [0, -1, 1.5, 2.0, "x", None], "limit_val_batches": [-1, 2.5, "x"], "callbacks": [[None], {"class_path": "X"}, "RunHistory"],
    "logger": [True, None, "x", {"class_path": "CSVLogger"}, [{"class_path": "X"}]], "default_root_dir": ["/proc/x", 3, ""],
    "profiler": ["x", "simple", 3], "detect_anomaly": ["x", None], "gradient_clip_val": [1.0, "x", -1], "accumulate_grad_batches": [2, 0, "x"],
    "plugins": ["x", [1]], "log_every_n_steps": [0, -1, None], "check_val_every_n_epoch": [0, -1, None, 1.5], "fast_dev_run": [-1, "x", True],
    "max_time": ["x", "00:00:00:01", -1], "reload_dataloaders_every_n_epochs": [-1], "num_sanity_val_steps": [-2], "overfit_batches": [-1, "x"],
    "barebones": [True], "sync_batchnorm": [True, "x"], "use_distributed_sampler": [None], "deterministic": ["warn", "x"], "benchmark": ["x"],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run's configuration file and what follows it on the command line."""

    text: bytes
    options: tuple[str, ...]
    what: str


def cases(base: dict[str, Any], seed: int, count: int, *, within: str = "") -> Iterator[Case]:
    """`count` mutations of `base`, the same for the same seed.

    Args:
        base: A right configuration.
        seed: Of the choice.
        count: How many.
        within: Mutate below this dotted key only.
    """
    draw = random.Random(seed)
    for number in range(count):
        config = copy.deepcopy(base)
        if number % 3 == 0 and "model" in config:
            config["model"]["init_args"]["objective"] = copy.deepcopy(draw.choice(OBJECTIVES))
        kinds = [_value, _value, _value, _key, _remove, _option, _option, _text]
        if not within or within == "trainer":
            kinds += [_trainer, _trainer]
        yield draw.choice(kinds)(config, draw, within)


def _value(config: dict[str, Any], draw: random.Random, within: str) -> Case:
    path = draw.choice(list(paths(config, within)))
    value = draw.choice(JUNK)
    put(config, path, value)
    return Case(dumped(config), (), f"{shown(path)} = {value!r}")


def _key(config: dict[str, Any], draw: random.Random, within: str) -> Case:
    path = draw.choice([path for path in paths(config, within) if isinstance(path[-1], str)])
    parent = at(config, path[:-1])
    old = path[-1]
    new: Any = draw.choice(
        [old[:-1], old + "s", old.upper(), old[1:] + old[0], 3, None, "", "a.b", "--" + old, LONG]
    )
    keep = draw.random() < 0.3
    parent[new] = parent[old] if keep else parent.pop(old)
    return Case(dumped(config), (), f"{shown(path)} named {new!r}")


def _remove(config: dict[str, Any], draw: random.Random, within: str) -> Case:
    path = draw.choice(list(paths(config, within)))
    del at(config, path[:-1])[path[-1]]
    return Case(dumped(config), (), f"without {shown(path)}")


def _option(config: dict[str, Any], draw: random.Random, within: str) -> Case:
    path = [one for one in draw.choice(list(paths(config, within))) if isinstance(one, str)]
    value = draw.choice(JUNK)
    text = (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    )
    name = f"--{'.'.join(path)}" + draw.choice(["", "", "", "s", ".x", ".init_args.x", "+"])
    options = draw.choice([(f"{name}={text}",), (name, text), (name,), (f"{name}={text}", f"{name}={text}")])
    return Case(dumped(config), options, " ".join(options))


def _trainer(config: dict[str, Any], draw: random.Random, within: str) -> Case:
    chosen = {
        name: draw.choice(TRAINER[name]) for name in draw.sample(sorted(TRAINER), draw.choice([1, 1, 2, 3]))
    }
    config["trainer"].update(chosen)
    return Case(dumped(config), (), f"trainer with {chosen!r}")


def _text(config: dict[str, Any], draw: random.Random, within: str) -> Case:
    text = dumped(config)
    place = draw.randrange(len(text))
    piece = draw.choice(
        [b"\t", b"{", b"}", b"[", b"&a ", b"*a", b"!!python/name:os.system ", b"\x00", b"\xff\xfe", b": ", b"- ", b"\n", b"'", b'"', b"#", b"%",
         b"|", b">", b"@", b"`", b"? ", b"<<: *a", b"\n---\n", b"!x ", b"\xe2\x80\xa8", b"&r [*r]"]
    )  # fmt: skip
    end = draw.choice([place, place, place + draw.randrange(1, 40), len(text)])
    return Case(text[:place] + piece + text[end:], (), f"{piece!r} at {place} to {end}")


def dumped(config: Any) -> bytes:
    return bytes(yaml.safe_dump(config, allow_unicode=True), "utf-8")


def paths(config: Any, within: str = "") -> Iterator[tuple[Any, ...]]:
    """Every place of a configuration, outer ones first."""
    inside = tuple(within.split(".")) if within else ()
    for path in _walk(config, ()):
        if path[: len(inside)] == inside:
            yield path


def _walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for key, one in items:
        yield from _walk(one, (*path, key))


def at(config: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def put(config: Any, path: tuple[Any, ...], value: Any) -> None:
    at(config, path[:-1])[path[-1]] = value


def shown(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
