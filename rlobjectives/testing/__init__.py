"""Check parts of one's own against the laws of this library: ``check_part(MyLoss()).raise_if_failed()``."""

from rlobjectives.testing.cases import MicroBatch, Shard
from rlobjectives.testing.check import Finding, Report, check_part
from rlobjectives.testing.compare import LawError
from rlobjectives.testing.examples import Example

__all__ = ["Example", "Finding", "LawError", "MicroBatch", "Report", "Shard", "check_part"]
