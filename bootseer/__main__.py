"""Program `bootseer`, also started by `python -m bootseer`."""

import gc
import importlib
import os
import sys

# Most objects of a command are made by imports and stay: collecting garbage as often as Python does
# by default (every 700 new objects) takes a tenth of a short command's time.
_NEW_OBJECTS = 50_000


def main() -> None:
    """Run the command of this program's arguments, and exit."""
    if "BOOTSEER_DISABLE" in os.environ:
        from bootseer.cli.disabled import become_command

        become_command(sys.argv[1:])
    try:
        _run()
    except KeyboardInterrupt:
        # Pressed while modules were loaded; later `bootseer.cli.main` handles it.
        sys.exit(130)
    except ModuleNotFoundError as error:
        from bootseer.errors import exit_code_of, missing_package

        said = missing_package(error)
        if said is error:
            raise
        sys.stderr.write(f"bootseer: {said}\n")
        sys.exit(exit_code_of(said))


def _run() -> None:
    gc.set_threshold(_NEW_OBJECTS)
    _load_msgspec()
    from bootseer.cli.main import main as run

    run()


def _load_msgspec() -> None:
    """Import msgspec without what it imports and a start does not need, a third of its time.

    That is typing_extensions, which it prefers to `typing` for the sake of Python 3.10; platform,
    which uuid asks for the name of the kernel; and five modules of its own, imported when they are
    used.
    """
    module = type(sys)
    kernel = module("platform")
    kernel.system = lambda: os.uname().sysname  # type: ignore[attr-defined]
    later = ("inspect", "json", "msgpack", "toml", "yaml")
    stubs = {"typing_extensions": None, "platform": kernel}
    stubs |= {f"msgspec.{name}": module(name) for name in later}
    stubs = {name: stub for name, stub in stubs.items() if name not in sys.modules}
    sys.modules.update(stubs)  # type: ignore[arg-type]
    try:
        import msgspec
    finally:
        for name in stubs:
            del sys.modules[name]

    def load(name: str) -> object:
        if name not in later:
            raise AttributeError(name)
        return importlib.import_module(f"msgspec.{name}")

    for name in later:
        if f"msgspec.{name}" in stubs:
            delattr(msgspec, name)
    vars(msgspec)["__getattr__"] = load


if __name__ == "__main__":
    main()
