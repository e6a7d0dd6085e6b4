"""Finds the cases: every module in `bench.cases` declares one as `CASE`."""

import importlib
import pkgutil

import bench.cases
from bench.model import Case


def all_cases() -> dict[str, Case]:
    """By name, sorted."""
    found: dict[str, Case] = {}
    for module in pkgutil.iter_modules(bench.cases.__path__):
        case: Case = importlib.import_module(f"bench.cases.{module.name}").CASE
        found[case.name] = case
    return dict(sorted(found.items()))
