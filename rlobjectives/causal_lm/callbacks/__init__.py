"""Callbacks: what a run shows while it goes, and what it leaves behind."""

from rlobjectives.causal_lm.callbacks.completions import SaveCompletions
from rlobjectives.causal_lm.callbacks.export import ExportModel
from rlobjectives.causal_lm.callbacks.history import RunHistory
from rlobjectives.causal_lm.callbacks.progress import PolicyProgressBar

__all__ = ["ExportModel", "PolicyProgressBar", "RunHistory", "SaveCompletions"]
