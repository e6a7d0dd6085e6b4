"""Tests and the test bed use the product by its doors, so that an area can change inside."""

from tests.support.doors import modules, parts_of, read_doors, read_parts


def test_doors_are_modules_of_the_product() -> None:
    assert read_doors() - modules() == set()


def test_the_test_bed_uses_doors_only() -> None:
    assert dict(parts_of("testbed")) == {}


def test_tests_use_doors_or_the_parts_that_are_listed_for_them() -> None:
    """If this fails for a new test: go through a door. If a test needs a part no longer, or is to
    test one on purpose: `python -m tests.support.doors`."""
    assert dict(parts_of("tests")) == read_parts()
