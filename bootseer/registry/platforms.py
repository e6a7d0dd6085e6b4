"""Which of an image's platforms suits this machine. Pure but for asking what machine this is."""

import platform

# platform.machine() -> GOARCH, where they differ.
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "i686": "386",
    "loongarch64": "loong64",
}
# The variants of an architecture in the order of preference; others come last. Any machine runs
# what names no variant of amd64, and arm64 has only ever had v8.
_VARIANTS = {"amd64": ("", "v1"), "arm64": ("v8", ""), "arm": ("v7", "v6", "v5", "")}


def this_architecture() -> str:
    """What images call this machine's architecture."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def unsuitability(system: str, architecture: str, variant: str) -> int | None:
    """0 for the platform that suits this machine best, more for others; None: it does not run."""
    wanted = this_architecture()
    if architecture != wanted or system not in ("linux", ""):
        return None
    preferred = _VARIANTS.get(wanted, ())
    return preferred.index(variant) if variant in preferred else len(preferred)
