"""Old places of modules and names go on working: the same module, the same classes, and one warning."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import subprocess
import sys
import types
import warnings
from typing import Any

import pytest

import configurations
import public_surface
import rlobjectives
from rlobjectives import GRPO, _moved
from rlobjectives.layouts import scan

TABLE = {"former": "layouts", "former.scan": "layouts.scan", "estimators.former": "estimators.grpo"}
PLACES = [*TABLE, *_moved.MODULES]


@pytest.fixture
def table(monkeypatch):
    """Three more places: a package, a module in it, and a module of a package that is still there."""
    monkeypatch.setattr(_moved, "MODULES", {**_moved.MODULES, **TABLE})
    yield
    for old in TABLE:
        sys.modules.pop(f"rlobjectives.{old}", None)
        parent, _, name = f"rlobjectives.{old}".rpartition(".")
        vars(sys.modules.get(parent, types)).pop(name, None)


@pytest.mark.usefixtures("table")
def test_the_module_of_an_old_place_is_the_one_of_the_new():
    own = scan.__spec__
    with pytest.warns(DeprecationWarning, match=r"rlobjectives\.former is now rlobjectives\.layouts"):
        import rlobjectives.former.scan as old  # type: ignore[import-not-found]
    assert old is scan
    assert scan.__spec__ is own
    assert scan.__name__ == "rlobjectives.layouts.scan"
    assert sys.modules["rlobjectives.former"] is rlobjectives.layouts


@pytest.mark.usefixtures("table")
def test_it_says_so_once():
    with pytest.warns(DeprecationWarning, match="is now") as told:
        importlib.import_module("rlobjectives.estimators.former")
    assert len(told) == 1
    assert told[0].filename == importlib.__file__  # whoever imports it, not the finder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            importlib.import_module("rlobjectives.estimators.former")
            is sys.modules["rlobjectives.estimators.grpo"]
        )


@pytest.mark.usefixtures("table")
def test_an_old_pickle_loads():
    current = pickle.dumps(GRPO(scale="none"), protocol=0)
    old = current.replace(b"rlobjectives.estimators.grpo", b"rlobjectives.estimators.former")
    assert old != current
    with pytest.warns(DeprecationWarning, match=r"estimators\.former"):
        assert pickle.loads(old) == GRPO(scale="none")


@pytest.mark.usefixtures("table")
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_an_old_class_path_of_a_configuration_is_read():
    file = copy.deepcopy(configurations.files()["tests, 1"]["file"])
    file["model"]["init_args"]["objective"]["estimator"]["class_path"] = "rlobjectives.estimators.former.GRPO"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objective = configurations.parsed({"for": "lightning", "file": file})
    assert type(objective.estimator) is GRPO
    assert "rlobjectives.estimators.former" in sys.modules


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("name", ["rlobjectives.former.nowhere", "rlobjectives.estimators.nowhere", "former"])
def test_a_place_that_never_was_is_not_found_as_ever(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
            importlib.import_module(name)


def test_a_name_that_has_left_a_module_is_given_with_one_warning(monkeypatch):
    monkeypatch.setattr(_moved, "NAMES", {"former": {"estimators": "GRPO RLOO", "masking": "select"}})
    former = types.ModuleType("rlobjectives.former")
    monkeypatch.setitem(sys.modules, former.__name__, former)
    former.__getattr__ = _moved.moved_names(former.__name__)
    with pytest.warns(
        DeprecationWarning, match=r"rlobjectives\.former\.RLOO is now rlobjectives\.estimators\.RLOO"
    ):
        assert former.RLOO is rlobjectives.RLOO
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert former.RLOO is rlobjectives.RLOO
    former.__getattr__ = _moved.moved_names(former.__name__, warn=False)
    assert former.select is rlobjectives.masking.select
    with pytest.raises(AttributeError, match=r"module 'rlobjectives\.former' has no attribute 'nothing'"):
        former.nothing  # noqa: B018


@pytest.mark.usefixtures("table")
def test_a_module_that_has_left_a_package_is_one_of_its_attributes(monkeypatch):
    package: Any = rlobjectives.estimators
    monkeypatch.setattr(package, "__getattr__", _moved.moved_names(package.__name__), raising=False)
    with pytest.warns(DeprecationWarning, match=r"rlobjectives\.estimators\.former is now"):
        assert package.former is sys.modules[GRPO.__module__]


PARSE = """
import sys
from rlobjectives.cli import main
for path in sys.argv[1:]:
    try:
        main(["fit", "--model", path, "--print_config"])
    except SystemExit as end:
        assert not end.code, path
"""


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_a_new_process_knows_a_policy_by_its_short_name_and_by_every_path_it_ever_had():
    package = "rlobjectives.integrations.lightning"
    paths = ("CausalLMPolicy", f"{package}.CausalLMPolicy", f"{package}.policy.CausalLMPolicy")
    run = subprocess.run([sys.executable, "-c", PARSE, *paths], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-500:]
    assert run.stdout.count("CausalLMPolicy") == len(paths)


@pytest.mark.parametrize("old", [*_moved.MODULES])
def test_every_old_place_leads_to_the_module_of_the_new(old):
    if public_surface.missing(f"rlobjectives.{old}") is not None:
        pytest.skip("its third parties are not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"rlobjectives.{old}")
        assert module is importlib.import_module(f"rlobjectives.{_moved.MODULES[old]}")


@pytest.mark.parametrize("old", [*_moved.NAMES])
def test_every_name_that_has_left_is_given(old):
    if public_surface.missing(f"rlobjectives.{old}") is not None:
        pytest.skip("its third parties are not installed")
    module = importlib.import_module(f"rlobjectives.{old}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, names in _moved.NAMES[old].items():
            new = importlib.import_module(f"rlobjectives.{place}")
            assert [name for name in names.split() if getattr(module, name) is not getattr(new, name)] == []


def test_a_name_stays_itself_after_the_module_of_its_name_was_imported():
    both = [
        (parent, name)
        for parent, places in _moved.NAMES.items()
        for name in " ".join(places.values()).split()
        if f"{parent}.{name}" in _moved.MODULES
    ]
    for parent, name in both:
        program = f"import rlobjectives.{parent}.{name}; from rlobjectives.{parent} import {name}; assert callable({name})"
        subprocess.run([sys.executable, "-c", program], check=True)
