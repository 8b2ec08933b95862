"""Mergeable statistics: what a window knows about all its tokens, whoever holds them.

A `Stat` is one row of float64 numbers with names. Rows of the same kind *fold* into one row, in
any grouping, and the all-zero row changes nothing, so micro-batches, ranks and idle ranks merge
the same way. That is all the distributed code has to know.
"""

from rlobjectives.statistics.base import Stat, fold, measured_values
from rlobjectives.statistics.extremes import LogSum, Maximum, Minimum
from rlobjectives.statistics.moments import Mean, Moments, Sum

__all__ = ["LogSum", "Maximum", "Mean", "Minimum", "Moments", "Stat", "Sum", "fold", "measured_values"]
