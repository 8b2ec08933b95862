"""Callbacks: what a run shows while it goes, and what it leaves behind."""

from rlobjectives.integrations.lightning.callbacks.completions import SaveCompletions
from rlobjectives.integrations.lightning.callbacks.export import ExportModel
from rlobjectives.integrations.lightning.callbacks.history import RunHistory
from rlobjectives.integrations.lightning.callbacks.progress import PolicyProgressBar

__all__ = ["ExportModel", "PolicyProgressBar", "RunHistory", "SaveCompletions"]
