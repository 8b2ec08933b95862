"""The test of a policy's model before its first rollout: padding, its critic, and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlobjectives.causal_lm.sampling import SamplingOptions
from rlobjectives.distributed import Communicator, replay
from rlobjectives.distributed.synchronize import raised_together
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.transformers.self_test import LOGPROBS, check_model
from rlobjectives.layouts import PaddedLayout

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.engine import Engine

__all__ = ["check_policy"]


def check_policy(module: Any, engine: Engine, *, samples: bool) -> None:
    """Run `check_model` the way the module trains: through the strategy, with its critic and its sampler.

    All ranks call it together. Weights, modes and random states are as before afterwards.

    Args:
        module: A `CausalLMPolicy`, set up.
        engine: Runs its forward.
        samples: Whether the module samples with its own model.

    Raises:
        CapabilityError: What is wrong with the model, on all ranks.
    """
    method = "score_with_values" if hasattr(module, "score_with_values") else "score"

    def score(input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        exists = attention_mask.bool()
        scored = exists & nn.functional.pad(exists[:, :-1], (1, 0))
        experience = Experience(
            input_ids=input_ids, attention_mask=attention_mask, layout=PaddedLayout(scored)
        )
        logprobs, _, *values = engine.forward(experience, method)
        return {LOGPROBS: logprobs, **({"values": values[0]} if values else {})}

    def sample(prompt_ids: Tensor, prompt_mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
        options = SamplingOptions(max_new_tokens=count, temperature=module.policy_temperature)
        never = torch.empty(0, dtype=torch.long, device=prompt_ids.device)
        found = module.complete_with(options, prompt_ids, prompt_mask, end_ids=never)
        return found.ids, found.logprobs

    engine.settle()
    with raised_together(Communicator.world()), replay(module):
        module.eval()
        check_model(
            module.model,
            score=score,
            sample=sample if samples else None,
            samples=samples,
            avoid=module.tokenizer.all_special_ids,
            pad_id=module.tokenizer.pad_token_id,
            hint="self_test: false (self_test=False) trains it all the same.",
        )
