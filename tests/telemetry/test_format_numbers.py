"""Numbers as text."""

import pytest

from rowcast.runtime.telemetry.format_numbers import percent_number


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0.0"),
        (1.0, "100.0"),
        (0.5, "50.0"),
        (0.00012, "0.01"),
        (0.99996, "99.996"),
        (3.127, "312.7"),
        (2.0, "200.0"),
    ],
)
def test_a_share_has_as_many_decimals_as_tell_it_from_nothing_and_everything(share: float, text: str) -> None:
    assert percent_number(share) == text
