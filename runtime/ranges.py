"""Types of numbers and texts that come from another process or from a file: msgspec refuses others as it reads."""

from typing import Annotated

from msgspec import Meta

NUMBER_LIMIT = 2**62  # two of them can be added in int64
TEXT_LIMIT = 4096  # characters
CONTROLS = r"\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ue000-\uf8ff"

Number = Annotated[int, Meta(ge=0, lt=NUMBER_LIMIT)]
Checksum = Annotated[int, Meta(ge=0)]  # of 64 bits
Seconds = Annotated[float, Meta(ge=0, lt=NUMBER_LIMIT)]
Text = Annotated[str, Meta(max_length=TEXT_LIMIT, pattern=f"^[^{CONTROLS}]*$")]  # fit for a terminal
