#!/usr/bin/env python3
"""Count the docstrings, also of attributes, that cannot be understood on their own.

Usage: plain_words.py [--list] [--most PERCENT] PATH...

Two shares of all docstrings are printed: those whose first word names nothing ("What", "Whose",
"Where", "How", "Of", ...), and those whose first paragraph refers to something by a pronoun or a
phrase without a noun ("somebody", "whoever", "what is", "of ours").
"""

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FIRST_WORDS = re.compile(
    r"\W*(what|which|where|whom|whose|who|how|when|why|of|as|by|behind|none|all|have|let|it|its|"
    r"that|those|these|nothing|nobody|somebody|one|neither|either)\b",
    re.IGNORECASE,
)
_PHRASES = re.compile(
    r"\b(nobody|somebody|whoever|whom|whatever|such a one|of ours|of theirs|of those|of which|"
    r"what (?:is|has|was|it|they|a|the|one)|let go|is over|which of|the one that|by itself what)\b",
    re.IGNORECASE,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


# The description of a value may say when it is None.
_NONE_IF = re.compile(r"None\b")


class Finding(NamedTuple):
    """First paragraph of a docstring, and its faults by the two rules."""

    line: int
    paragraph: str
    opens_with_riddle: bool
    hangs_on_pronoun: bool


def read_docstrings(source: str) -> Iterator[Finding]:
    """Yield one finding for each docstring of the Python module `source`, also for good ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield _judge(getattr(node, "lineno", 1), text)
        body = getattr(node, "body", None)
        for before, here in itertools.pairwise(body if isinstance(body, list) else ()):
            match before, here:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                    found = _judge(here.lineno, text)
                    yield found._replace(
                        opens_with_riddle=found.opens_with_riddle and not _NONE_IF.match(text)
                    )


def _judge(line: int, text: str) -> Finding:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return Finding(
        line,
        paragraph,
        _FIRST_WORDS.match(paragraph) is not None,
        _PHRASES.search(paragraph) is not None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each docstring that is counted")
    parser.add_argument(
        "--most", type=float, metavar="PERCENT", default=100.0,
        help="list the counted docstrings of a path, and exit with 1, if a share of it is larger",
    )  # fmt: skip
    parser.add_argument("paths", nargs="+", type=Path)
    arguments = parser.parse_args()
    failed = False
    for root in arguments.paths:
        total = riddle_count = hanging_count = 0
        listed = []
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            for found in read_docstrings(path.read_text(encoding="utf-8")):
                total += 1
                riddle_count += found.opens_with_riddle
                hanging_count += found.hangs_on_pronoun
                if found.opens_with_riddle or found.hangs_on_pronoun:
                    listed.append(f"{path}:{found.line}: {found.paragraph[:110]}\n")
        shares = [100 * count / max(total, 1) for count in (riddle_count, hanging_count)]
        is_over = max(shares) > arguments.most
        failed |= is_over
        if arguments.list or is_over:
            sys.stdout.writelines(listed)
        if arguments.most == 100 or is_over:
            sys.stdout.write(
                f"{root}: {total} docstrings: {shares[0]:.1f} % open with a riddle word,"
                f" {shares[1]:.1f} % hang on a pronoun\n"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
