"""Finds the cases: a module in `bench.cases` declares one as `CASE`, or several as `CASES`."""

import importlib
import pkgutil

import bench.cases
from bench.model import Case


def all_cases() -> dict[str, Case]:
    """Return the declared cases by name, sorted."""
    found: dict[str, Case] = {}
    for module in pkgutil.iter_modules(bench.cases.__path__, "bench.cases."):
        names = vars(importlib.import_module(module.name))
        declared: tuple[Case, ...] = names.get("CASES") or (names["CASE"],)
        found |= {case.name: case for case in declared}
    return dict(sorted(found.items()))
