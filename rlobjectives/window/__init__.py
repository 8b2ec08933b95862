"""The window: one optimizer step over all its micro-batches and ranks. Collect, freeze, use."""

from __future__ import annotations

from rlobjectives.window.builder import WindowBuilder
from rlobjectives.window.reports import Report, merge_reports
from rlobjectives.window.summary import ObjectiveOutput
from rlobjectives.window.window import Window

__all__ = ["ObjectiveOutput", "Report", "Window", "WindowBuilder", "merge_reports"]
