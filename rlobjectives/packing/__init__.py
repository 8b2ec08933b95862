"""Packing: which sequences share a row, and which rows each rank takes in each optimizer step.

A plan looks at lengths only; what the tokens are trained for does not change it.
"""

from rlobjectives.packing.balance import balance
from rlobjectives.packing.bins import fill_bins
from rlobjectives.packing.columns import Packing
from rlobjectives.packing.schedule import Schedule, schedule

__all__ = ["Packing", "Schedule", "balance", "fill_bins", "schedule"]
