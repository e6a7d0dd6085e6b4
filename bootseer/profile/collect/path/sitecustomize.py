"""Runs in every Python process below `bootseer run`, of any version: nothing of ours may fail."""

import sys


def _chain(here):
    """The sitecustomize that would have been found without ours; what it raises is its own."""
    import os
    from importlib.machinery import PathFinder

    places = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", places)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    ours = sys.modules.get("sitecustomize")
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules["sitecustomize"] = ours
        raise


def _watch(here, began_ns):
    """Note what this process does until it is ready."""
    import os

    if not os.environ.get("BOOTSEER_TIMELINE") or sys.version_info < (3, 11):
        return
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(os.path.dirname(here), "imports.py")
    spec = spec_from_file_location("_bootseer_collect", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    package = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    module.install(package, began_ns)


def _begin():
    import os
    import time

    began_ns = time.time_ns() if hasattr(time, "time_ns") else 0
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        _chain(here)
    finally:
        try:
            _watch(here, began_ns)
        except Exception:
            pass


_begin()
