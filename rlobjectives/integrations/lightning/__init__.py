"""Lightning: train any policy module with an objective, on one process, DDP, DeepSpeed ZeRO or FSDP2."""

from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.mixin import ObjectiveMixin
from rlobjectives.integrations.lightning.strategy import DeepSpeedCPUStrategy, resolve_strategy

__all__ = ["DeepSpeedCPUStrategy", "Experience", "ObjectiveMixin", "resolve_strategy"]
