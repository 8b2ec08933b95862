"""Configuration files name parts by class name alone, which needs one class a name."""

import collections

import pytest

from rlobjectives import Estimator, KLPenalty, LossReduction, PolicyLoss


def descendants(base):
    for kind in base.__subclasses__():
        yield kind
        yield from descendants(kind)


@pytest.mark.parametrize("base", [Estimator, PolicyLoss, LossReduction, KLPenalty])
def test_each_part_is_one_class(base):
    # A frozen dataclass with slots is made twice, and the first class never goes away.
    own = [kind for kind in descendants(base) if kind.__module__.startswith("rlobjectives.")]
    double = [name for name, count in collections.Counter(kind.__name__ for kind in own).items() if count > 1]
    assert not double, f"{double} exist twice under {base.__name__}: leave out slots=True on parts"
