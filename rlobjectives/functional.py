"""Every pure function in one place, for those who want the maths without the parts."""

from rlobjectives import estimators, losses, maths, terms
from rlobjectives.estimators import *
from rlobjectives.losses import *
from rlobjectives.maths import *
from rlobjectives.scores import reward_matrix
from rlobjectives.terms import *
from rlobjectives.window.gradients import weighted_sum

# Classes are parts and public in the package; what is not one is a function.
_ROOMS = (estimators, losses, maths, terms)

__all__ = [
    *(name for room in _ROOMS for name in room.__all__ if name.islower()),
    "reward_matrix",
    "weighted_sum",
]
