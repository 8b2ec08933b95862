"""Token layouts: the only place that tells padding from packing."""

from rlobjectives.layouts.base import TokenLayout
from rlobjectives.layouts.packed import PackedLayout
from rlobjectives.layouts.padded import PaddedLayout

__all__ = ["PackedLayout", "PaddedLayout", "TokenLayout"]
