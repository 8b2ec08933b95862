"""What weighs or drops tokens of the policy loss: importance weights, tests, masks."""

from rlobjectives.corrections.base import PolicyCorrection, TokenWeights
from rlobjectives.corrections.entropy_mask import EntropyMask
from rlobjectives.corrections.importance import ImportanceCorrection
from rlobjectives.corrections.opsm import OPSM
from rlobjectives.corrections.rejection import Rejection

__all__ = ["OPSM", "EntropyMask", "ImportanceCorrection", "PolicyCorrection", "Rejection", "TokenWeights"]
