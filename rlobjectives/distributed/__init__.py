"""Everything that talks to other ranks: one message per window, folded in rank order."""

from rlobjectives.distributed.communicator import LOCAL, Communicator
from rlobjectives.distributed.context_parallel import full_token_counts
from rlobjectives.distributed.ending import ends_together
from rlobjectives.distributed.gradient_scale import GradientScale
from rlobjectives.distributed.pipeline import PipelineCommunicator
from rlobjectives.distributed.replay import RandomState, ReplayIterator, replay
from rlobjectives.distributed.synchronize import Fault, check_agreement, raised_together, synchronize

__all__ = [
    "LOCAL",
    "Communicator",
    "Fault",
    "GradientScale",
    "PipelineCommunicator",
    "RandomState",
    "ReplayIterator",
    "check_agreement",
    "ends_together",
    "full_token_counts",
    "raised_together",
    "replay",
    "synchronize",
]
