"""Code that runs first in every Python process below `bootseer run`, in any version of Python.

A failure of ours must not reach the program.
"""

import os
import sys


def _run_next(here):
    """Run the sitecustomize module that this one hides; its exceptions pass through."""
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


def _record(here, began_ns):
    """Begin to record this process's imports, if there is a timeline."""
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


def _preload(here, variables_read):
    """Be a preloader; a worker forked from the preloader returns from this function."""
    initial_modules = set(sys.modules)
    from importlib.util import module_from_spec, spec_from_file_location

    package = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    spec = spec_from_file_location(
        "bootseer", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    sys.modules["bootseer"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["bootseer"])
    from bootseer.served.preload.server import serve

    serve(initial_modules, variables_read)


def _track_variables():
    """Record which variables are read from now on; return them and the original encoder."""
    found = {}
    environ = os.environ
    encode = environ.encodekey

    def note(name):
        found.setdefault(name, None)
        return encode(name)

    environ.encodekey = note
    return found, encode


def _begin():
    import time

    began_ns = time.time_ns() if hasattr(time, "time_ns") else 0
    here = os.path.dirname(os.path.abspath(__file__))
    is_preloader = "BOOTSEER_PRELOADER" in os.environ
    if is_preloader:
        variables_read, encode = _track_variables()
    try:
        _run_next(here)
    except BaseException:
        if is_preloader:
            os._exit(1)
        raise
    finally:
        if is_preloader:
            os.environ.encodekey = encode
            try:
                _preload(here, variables_read)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        try:
            _record(here, began_ns)
        except Exception:
            pass


_begin()
