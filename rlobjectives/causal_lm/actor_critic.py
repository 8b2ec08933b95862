"""CausalLMActorCritic: a language-model policy and its critic, for PPO."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from rlobjectives.causal_lm.optimizer import actor_critic_optimizer
from rlobjectives.causal_lm.policy import CausalLMPolicy
from rlobjectives.causal_lm.policy_options import check_fits
from rlobjectives.causal_lm.scoring import score_sequences_with_values, values_of_frozen_model
from rlobjectives.causal_lm.sharding import shard_blocks
from rlobjectives.checks import check_choice, check_number
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.critic import CriticMixin
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.randomness import base_seed, derive_seed, seeded
from rlobjectives.integrations.transformers.value import CausalLMWithValue, ValueHead

__all__ = ["CausalLMActorCritic"]


class CausalLMActorCritic(CriticMixin, CausalLMPolicy):
    """`CausalLMPolicy` with a critic, for objectives that read values: PPO with GAE.

    The critic is a language model with one number for each hidden state (`CausalLMWithValue`). With a backbone of its
    own it starts as a copy of the policy, costs a second model, and disturbs the policy in no way. With the policy's
    backbone it costs one vector and no forward; the value loss then trains the policy's layers too, in proportion to
    its ``coef``, except in steps that train the critic alone, which train the head alone.

    All options of `CausalLMPolicy` and `CriticMixin` hold. Policy and critic are groups of one AdamW; with
    ``critic_warmup_steps`` the policy's own learning-rate warm-up begins when the policy does. A trainer that casts
    the whole module (``bf16-true``, DeepSpeed with bf16) rounds the head's weights too; values are still computed and
    given in float32, and DeepSpeed's optimizer keeps float32 weights.

    Args:
        critic_learning_rate: Of the critic, after its warm-up.
        critic_backbone: ``"own"`` or ``"shared"``.
        critic_name_or_path: Folder of a saved critic to begin with, in place of a copy of the policy.
        **kwargs: The options of `CriticMixin` and `CausalLMPolicy`.

    Raises:
        CapabilityError: If an option is out of range, or the folder holds no critic.

    Example:
        >>> from rlobjectives import Objective
        >>> agent = CausalLMActorCritic(                                        # doctest: +SKIP
        ...     objective=Objective.named("ppo"), rewards=["my_project.rewards.correct"],
        ...     model_name_or_path="my-org/my-model", max_new_tokens=256,
        ...     critic_learning_rate=1e-5, critic_warmup_steps=20)
    """

    def __init__(
        self,
        *,
        critic_learning_rate: float = 1e-5,
        critic_backbone: Literal["own", "shared"] = "own",
        critic_name_or_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_number("critic_learning_rate", critic_learning_rate, low=0.0)
        check_choice("critic_backbone", critic_backbone, ("own", "shared"))
        if self.bootstrap_truncated:  # the state after the last token is read at one position more
            longest = self.sampling.max_new_tokens + 1
            check_fits(
                self.model, self.tokenizer, max_prompt_tokens=self.max_prompt_tokens, max_new_tokens=longest
            )
        self.critic_learning_rate = critic_learning_rate
        self.critic_backbone = critic_backbone
        self.critic: CausalLMWithValue | None = None
        with seeded(derive_seed(base_seed(self.seed), "critic")):
            if critic_backbone == "own":
                self.critic = _own_critic(self.model, critic_name_or_path)
            else:
                self.shared_head = _shared_head(self.model, critic_name_or_path)

    @property
    def value_head(self) -> ValueHead:
        """The map from hidden states to values."""
        return self.shared_head if self.critic is None else self.critic.value_head

    def critic_model(self) -> CausalLMWithValue:
        """The critic as a model of its own, to call or save; a shared backbone is the policy's."""
        if self.critic is not None:
            return self.critic
        critic = CausalLMWithValue(self.model, hidden_size=self.value_head.summary.in_features)
        critic.value_head = self.value_head
        return critic

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """The critic's trainable weights; with a shared backbone those of the head."""
        return [one for one in (self.critic or self.value_head).parameters() if one.requires_grad]

    def watched_parameters(self) -> Iterable[nn.Parameter]:
        """The value head's weights."""
        return self.value_head.parameters()

    @property
    def marks_truncated(self) -> bool:
        """Whether rollouts say which completions were cut off: those without an end token."""
        return self.bootstrap_truncated

    def score_values(self, micro_batch: Experience) -> Tensor:
        """Values of a micro-batch; the policy's layers, if shared, get no gradient."""
        if self.critic is None:
            return values_of_frozen_model(self.model, self.value_head, micro_batch)
        values: Tensor = self.critic(micro_batch.input_ids, micro_batch.attention_mask)
        return values

    def score_with_values(self, micro_batch: Experience) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probabilities, entropies if needed, and values; a shared backbone runs once."""
        if self.critic is not None:
            return super().score_with_values(micro_batch)
        return score_sequences_with_values(
            self.model,
            self.value_head,
            micro_batch,
            temperature=self.policy_temperature,
            entropy="entropy" in self.objective.columns(),
        )

    def configure_optimizers(self) -> Any:
        """AdamW with groups for policy and critic; override for another optimizer with groups named alike."""
        return actor_critic_optimizer(
            self.policy_parameters(),
            self.critic_parameters(),
            learning_rate=self.learning_rate,
            critic_learning_rate=self.critic_learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
            warmup_steps=self.warmup_steps,
            critic_warmup_steps=self.critic_warmup_steps,
        )

    def configure_model(self) -> None:
        """Shard the critic like the policy where the strategy wants the module to do it itself (FSDP2)."""
        super().configure_model()
        if self.device_mesh is not None:
            shard_blocks(self.critic or self.value_head, self.device_mesh["data_parallel"])


def _own_critic(policy: nn.Module, source: str | None) -> CausalLMWithValue:
    if source is None:
        return CausalLMWithValue.copy_of(policy)
    parameter = next(policy.parameters())
    return CausalLMWithValue.from_pretrained(_saved(source), dtype=parameter.dtype).train()


def _shared_head(policy: Any, source: str | None) -> ValueHead:
    if source is not None:
        return CausalLMWithValue.from_pretrained(_saved(source)).value_head
    return CausalLMWithValue(policy).value_head


def _saved(source: str) -> Path:
    if not CausalLMWithValue.is_saved_in(source):
        raise CapabilityError(
            f"critic_name_or_path is {source!r}, which holds no critic. Give a folder written by "
            "CausalLMWithValue.save_pretrained, or leave it out to start from the policy."
        )
    return Path(source)
