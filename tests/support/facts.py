"""Patterns for `pytest.raises(match=...)` that pin what an error states, and leave its wording free."""

import re


def facts(*found: object) -> str:
    """Matches a text that has all of these, in any order: keys, numbers, names. A whole word each: 3 is not in 30."""
    return "(?s)" + "".join(f"(?=.*{whole(str(one))})" for one in found)


def whole(text: str) -> str:
    before = r"(?<![\w])(?<!\d\.)" if re.match(r"\w", text) else ""
    after = r"(?!\w|\.\d)" if re.search(r"\w$", text) else ""
    return before + re.escape(text) + after
