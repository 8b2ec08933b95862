"""Token log-probabilities and entropy, from logits or without ever building them."""

from rlobjectives.logprobs.from_hidden import hidden_logprobs
from rlobjectives.logprobs.from_logits import sequence_logprobs, token_logprobs

__all__ = ["hidden_logprobs", "sequence_logprobs", "token_logprobs"]
