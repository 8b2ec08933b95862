"""Lightning: train any policy module with an objective, on one process, DDP, DeepSpeed ZeRO or FSDP2."""

from typing import TYPE_CHECKING

from rlobjectives._moved import moved_names
from rlobjectives.integrations.extras import need

# Before anything of Lightning is imported, so that a missing package names the extra that brings it.
need("rlobjectives.integrations.lightning", "lightning", "lightning", "transformers", "numpy")

from rlobjectives.integrations.lightning.critic import CriticMixin
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.mixin import ObjectiveMixin

if TYPE_CHECKING:  # imported when somebody asks for it: it is made of these adapters and lies above them
    from rlobjectives.causal_lm import *

__all__ = ["CriticMixin", "Experience", "ObjectiveMixin"]

__getattr__ = moved_names(__name__, warn=False)
