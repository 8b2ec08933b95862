"""What is reported about rewards, groups, advantages, values and lengths, from raw numbers."""

from rlobjectives.metrics.advantages import advantage_metrics
from rlobjectives.metrics.groups import GROUP_METRICS, group_metrics
from rlobjectives.metrics.lengths import LENGTH_METRICS, length_metrics
from rlobjectives.metrics.rewards import reward_metrics
from rlobjectives.metrics.values import VALUE_METRICS, ExplainedVariance, value_metrics

__all__ = [
    "ExplainedVariance",
    "advantage_metrics",
    "group_metrics",
    "length_metrics",
    "reward_metrics",
    "value_metrics",
]

CREDIT_METRICS = {**GROUP_METRICS, **VALUE_METRICS, **LENGTH_METRICS}
