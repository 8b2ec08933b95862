"""A run in which nothing counts: said, instead of going on for ever or ending as if it had trained."""

from __future__ import annotations

from rlobjectives.distributed.faults import told
from rlobjectives.errors import WindowError

__all__ = ["refuse_emptiness"]


def refuse_emptiness(empty: int, limit: int, never: str) -> None:
    """Raise if too many rollouts in a row had no counted token. All ranks count the same, so all raise.

    Args:
        empty: Such rollouts in a row.
        limit: ``max_empty_rollouts``.
        never: What the run would do otherwise.

    Raises:
        WindowError: Saying what to look at.
    """
    if empty < limit:
        return
    error = WindowError(
        f"the last {empty} rollouts had no counted token on any rank, so no optimizer step was taken, and {never}. "
        "Look at the completions: are all of them empty, cut off (and masked for it), or dropped because every group "
        "has equal rewards? If such a stretch is to be expected, raise max_empty_rollouts."
    )
    raise told(error)
