"""Tests and the test bed import doors of the product only, so that its inside can change."""

from tests.support.doors import modules, parts_of, read_doors, read_parts


def test_doors_are_modules_of_the_product() -> None:
    assert read_doors() - modules() == set()


def test_the_test_bed_uses_doors_only() -> None:
    assert dict(parts_of("testbed")) == {}


def test_tests_use_doors_or_the_parts_that_are_listed_for_them() -> None:
    # A new test should go through a door. Where it tests a part on purpose, or an old one needs its
    # part no longer: `python -m tests.support.doors`.
    assert dict(parts_of("tests")) == read_parts()
