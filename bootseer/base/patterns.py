"""Regular expressions that are compiled at their first use: most commands need few of those that
their modules have, and to compile all of them took a twentieth of a short one. Any thread.
"""

import re
from typing import Any, cast

_METHODS = ("search", "match", "fullmatch", "finditer", "split", "sub")


class _LazyPattern:
    def __init__(self, pattern: str, flags: re.RegexFlag) -> None:
        self._pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(self._pattern, self._flags)
        # Found without asking here from now on.
        vars(self).update((method, getattr(compiled, method)) for method in _METHODS)
        return getattr(compiled, name)


def lazy_pattern(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """As `re.compile`, but a fault of the pattern is an error of its first use."""
    return cast("re.Pattern[str]", _LazyPattern(pattern, flags))
