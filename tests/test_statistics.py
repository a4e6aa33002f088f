"""What a comparison needs beside intervals: Holm's adjustment, groups."""

import pytest

from posbench.report.comparison.statistics import holm, two_groups


def test_holm_agrees_with_a_worked_example_and_keeps_the_order_of_its_arguments() -> None:
    # Sorted .005 .01 .03 .04, times 4 3 2 1; .04 is raised to .06, since no p may fall below an earlier one.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.7, 0.9]) == [1.0, 1.0]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_two_groups_are_seen_and_one_group_is_not() -> None:
    assert two_groups([0.02, 0.03, 0.9, 0.95, 0.97])
    assert not two_groups([0.2, 0.3, 0.4, 0.5, 0.6])
    assert not two_groups([0.001, 0.002, 0.05, 0.051])  # apart, by less than matters
    assert two_groups([0.80, 0.83, 0.84, 0.88, 1.26])  # one against the rest: the published sinusoids
    assert not two_groups([0.80, 0.83, 0.84, 0.88, 1.02])  # farther from the rest than its range, by less than twice
