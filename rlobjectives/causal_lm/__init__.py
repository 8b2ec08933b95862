"""The ready-made training of language models with Lightning: policies, sampling, rewards, data, callbacks."""

from rlobjectives.integrations.extras import need

# Before anything of Lightning is imported, so that a missing package names the extra that brings it.
need("rlobjectives.causal_lm", "lightning", "lightning", "transformers", "numpy")

from rlobjectives.causal_lm.actor_critic import CausalLMActorCritic
from rlobjectives.causal_lm.callbacks import ExportModel, PolicyProgressBar, RunHistory, SaveCompletions
from rlobjectives.causal_lm.data import PromptDataModule
from rlobjectives.causal_lm.policy import CausalLMPolicy
from rlobjectives.causal_lm.prompts import PromptBatch
from rlobjectives.causal_lm.sampling import SamplingOptions, sample_completions
from rlobjectives.causal_lm.strategy import DeepSpeedCPUStrategy, resolve_strategy
from rlobjectives.causal_lm.transcript import Transcript
from rlobjectives.integrations.snapshots import PolicySnapshots

__all__ = [
    "CausalLMActorCritic",
    "CausalLMPolicy",
    "DeepSpeedCPUStrategy",
    "ExportModel",
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
