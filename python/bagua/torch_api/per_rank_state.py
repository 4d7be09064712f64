"""Checks that a rank loads only its own state, for state that differs between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def require_own(state: Mapping[str, Any], mine: Mapping[str, Any], kinds: Sequence[str], remedy: str) -> None:
    """Raises ValueError unless the entries ``kinds`` of ``state`` were saved by this rank, among the same members.

    ``mine`` has "rank" and "world_size", and "members" if ranks exchange with some ranks only. Entries that ``state``
    lacks, as in older versions, are not compared. Without this check, another rank's state would be wrong unnoticed: a
    replica of a former neighbour, for example, would keep the ranks' weights apart for good.
    """
    theirs = {**mine, **{name: state[name] for name in mine if name in state}}
    if not kinds or theirs == mine:
        return
    whose, own = (f"rank {each['rank']} of {each['world_size']}" for each in (theirs, mine))
    if whose == own:
        whose, own = f"{whose} among {list(theirs['members'])}", f"it among {list(mine['members'])}"
    raise ValueError(
        f"this is the state of {whose}, and this is {own}: its {', '.join(map(repr, kinds))} fit no other rank and "
        f"no other number of ranks or hosts; {remedy}"
    )
