"""Numbers are shown with the digits that tell them apart."""

from eclip.core.display import digits_apart, told_apart


def test_a_limit_and_what_exceeds_it_never_look_alike() -> None:
    assert told_apart(3.134, 3.13) == ("3.134", "3.130")
    assert told_apart(3.1301, 3.13) == ("3.1301", "3.1300")
    assert told_apart(2.5, 3.13) == ("2.50", "3.13")
    assert told_apart(3.13, 3.13) == ("3.13", "3.13")


def test_a_column_has_the_digits_of_its_closest_pair() -> None:
    assert digits_apart(3.13, [2.0, None, 3.134]) == 3
    assert digits_apart(3.13, []) == 2
