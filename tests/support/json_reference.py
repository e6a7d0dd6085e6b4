"""Renders docs/json.md from the structs of commands: `python -m tests.support.json_reference`.

What stands behind the marker is written by hand: documents that are no structs. The test
tests/docs/test_cli_reference.py fails when the committed file is not what this writes.
"""

import ast
import enum
import inspect
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from msgspec import Struct, UnsetType

from bootseer.cli.command_tree import cli
from testbed.paths import REPOSITORY
from tests.support.cli_reference import commands, root_context

PATH = REPOSITORY / "docs" / "json.md"
_MARKER = "<!-- By hand from here on. -->"
_HEAD = """# What `--json` prints

Generated from the code (`make docs`) down to the [report](#report), which is written by hand.

For programs: one JSON document on stdout. Keys are added, never removed or renamed. Sizes are in
bytes, `_ns` are nanoseconds since 1970 (or of a duration), other times are seconds. Bytes of names
that are no UTF-8 are shown as `\\udcXX` (image, trace) or `\\xXX` (snapshot). `[]` is a list, `.*`
an object whose keys are data; a key that is "absent or" something is left out where it says
nothing.
"""
_KINDS: dict[Any, str] = {
    str: "text",
    Path: "text",
    int: "number",
    float: "number",
    bool: "true or false",
    Any: "anything",
}


def field_docs(kind: type[Struct]) -> dict[str, str]:
    """Return the docstring below each field of a struct and of its bases, on one line."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not (issubclass(cls, Struct) and cls.__struct_fields__):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                text = inspect.cleandoc(str(below.value.value))
                found[field.target.id] = " ".join(text.split())
    return found


def rows(kind: Any, path: str = "", text: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, kind of value and meaning of all that a document of this type holds."""
    choices = [kind]
    if get_origin(kind) is Annotated:
        choices = [get_args(kind)[0]]
    elif get_origin(kind) in (Union, types.UnionType):
        choices = list(get_args(kind))
    also = "".join(
        word
        for word, one in (("absent or ", UnsetType), ("null or ", types.NoneType))
        if one in choices
    )
    wanted = [one for one in choices if one not in (UnsetType, types.NoneType)]
    base = wanted[0]
    inner = get_args(base)
    if also and get_origin(base) in (list, tuple, dict):
        yield path, f"{also}{'object' if get_origin(base) is dict else 'list'}", text
        text = ""
    if get_origin(base) in (list, tuple):
        if not path and _is_struct(inner[0]):
            yield from rows(inner[0], "[]")
            return
        yield from rows(inner[0], f"{path}[]", text)
    elif get_origin(base) is dict:
        yield from rows(inner[1], f"{path}.*" if path else "*", text)
    elif _is_struct(base):
        if path and (also or text):
            yield path, f"{also}object", text
        docs = field_docs(base)
        hints = get_type_hints(base, include_extras=True)
        for name in base.__struct_fields__:
            yield from rows(hints[name], f"{path}.{name}" if path else name, docs.get(name, ""))
    else:
        shown = " or ".join(dict.fromkeys(map(_kind_of, wanted)))
        yield path, also + shown, text


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _kind_of(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(f"`{one.value}`" for one in kind)
    return _KINDS.get(kind, "text")


def _table(kind: Any) -> Iterator[str]:
    yield "| key | value | meaning |"
    yield "|---|---|---|"
    for key, value, text in rows(kind):
        if text[1:2].islower():
            text = text[:1].lower() + text[1:]
        yield f"| `{key}` | {value} | {text.removesuffix('.')} |"
    yield ""


def documents() -> Iterator[tuple[str, Any]]:
    """Yield each command that returns a struct, and the type."""
    for command, context in commands(cli, root_context()):
        document = getattr(command.callback, "document", None)
        if document is not None:
            yield context.command_path.removeprefix("bootseer "), document


def render() -> str:
    """Return the whole page."""
    lines = [_HEAD]
    seen: dict[str, str] = {}
    for path, document in documents():
        lines += [f"## {path}", ""]
        same = seen.setdefault(repr(document), path)
        if same != path:
            lines += [f"As [`{same}`](#{same.replace(' ', '-')}).", ""]
        elif get_origin(document) in (Union, types.UnionType):
            for one in get_args(document):
                lines += [inspect.cleandoc(one.__doc__ or ""), "", *_table(one)]
        else:
            lines += _table(document)
    by_hand = PATH.read_text(encoding="utf-8").partition(_MARKER)[2]
    return "\n".join(lines) + f"\n{_MARKER}{by_hand}"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
