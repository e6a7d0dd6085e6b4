"""Runs in every Python process below `bootseer run`, of whatever version: nothing here may fail.

The sitecustomize of the environment itself comes first.
"""

import sys


def _begin():
    import os
    import time

    began_ns = time.time_ns()
    here = os.path.dirname(os.path.abspath(__file__))
    _chain(here)
    if not os.environ.get("BOOTSEER_TIMELINE") or sys.version_info < (3, 11):
        return
    package = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(os.path.dirname(here), "imports.py")
    spec = spec_from_file_location("_bootseer_collect", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.install(package, began_ns)


def _chain(here):
    """The sitecustomize that would have been found without ours."""
    from importlib.machinery import PathFinder

    places = [entry for entry in sys.path if _os_path(entry) != here]
    spec = PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        ours = sys.modules.get("sitecustomize")
        sys.modules["sitecustomize"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules["sitecustomize"] = ours
            raise


def _os_path(entry):
    import os

    return os.path.abspath(entry or os.curdir)


try:
    _begin()
except ImportError:
    pass
