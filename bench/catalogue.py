"""Finds the cases: every module below `bench.cases` declares one as `CASE`."""

import importlib
import pkgutil

import bench.cases
from bench.model import Case


def all_cases() -> dict[str, Case]:
    """The declared cases by name, sorted."""
    found: dict[str, Case] = {}
    for module in pkgutil.walk_packages(bench.cases.__path__, "bench.cases."):
        if not module.ispkg:
            case: Case = importlib.import_module(module.name).CASE
            found[case.name] = case
    return dict(sorted(found.items()))
