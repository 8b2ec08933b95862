"""Lightning: train any policy module with an objective, on one process, DDP, DeepSpeed ZeRO or FSDP2."""

from rlobjectives.integrations.extras import need

# Before anything of Lightning is imported, so that a missing package names the extra that brings it.
need("rlobjectives.integrations.lightning", "lightning", "lightning", "transformers", "numpy")

from rlobjectives.integrations.lightning.actor_critic import CausalLMActorCritic
from rlobjectives.integrations.lightning.callbacks import (
    ExportModel,
    PolicyProgressBar,
    RunHistory,
    SaveCompletions,
)
from rlobjectives.integrations.lightning.critic import CriticMixin
from rlobjectives.integrations.lightning.data import PromptDataModule
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.mixin import ObjectiveMixin
from rlobjectives.integrations.lightning.policy import CausalLMPolicy
from rlobjectives.integrations.lightning.prompts import PromptBatch
from rlobjectives.integrations.lightning.sampling import SamplingOptions, sample_completions
from rlobjectives.integrations.lightning.strategy import DeepSpeedCPUStrategy, resolve_strategy
from rlobjectives.integrations.lightning.transcript import Transcript
from rlobjectives.integrations.snapshots import PolicySnapshots

__all__ = [
    "CausalLMActorCritic",
    "CausalLMPolicy",
    "CriticMixin",
    "DeepSpeedCPUStrategy",
    "Experience",
    "ExportModel",
    "ObjectiveMixin",
    "PolicyProgressBar",
    "PolicySnapshots",
    "PromptBatch",
    "PromptDataModule",
    "RunHistory",
    "SamplingOptions",
    "SaveCompletions",
    "Transcript",
    "resolve_strategy",
    "sample_completions",
]
