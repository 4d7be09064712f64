"""States of which a rank can use only its own: the error of another rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def require_own(state: Mapping[str, Any], mine: Mapping[str, Any], kinds: Sequence[str], remedy: str) -> None:
    """ValueError unless the entries ``kinds`` of the state are those of this rank, among the same members.

    ``mine`` has "rank" and "world_size", and "members" where these are exchanged with; what the state lacks of them, as
    one of an older version does, is not compared. Another rank's state would be wrong without a sign: a replica of a
    neighbour that is another rank now, for instance, keeps the weights apart for good.
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
