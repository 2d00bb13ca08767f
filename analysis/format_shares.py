"""How analysis commands write shares for a person."""

import math

from rowcast.analysis.profile.interval import Share


def percent(share: float) -> str:
    """Without the sign. One decimal, and more where a share would look like nothing or like everything and is not. It may be above 1."""
    distance = 100 * abs(min(share, 1 - share))
    decimals = 1 if distance == 0 else min(4, max(1, math.ceil(-math.log10(distance))))
    return f"{100 * share:.{decimals}f}"


def percent_interval(share: Share | None) -> str:
    """`62.1 (60.0 to 64.2)`."""
    if share is None:
        return "none"
    if share.low == share.high:
        return percent(share.estimate)
    return f"{percent(share.estimate)} ({percent(share.low)} to {percent(share.high)})"
