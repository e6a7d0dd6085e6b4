"""Protocol Buffers message classes built from tables of fields, without generated code.

Generated code would have to match the installed version of protobuf. The classes live in a
descriptor pool of their own, so that they cannot clash with another library's copy of the same
messages. Unknown fields are skipped. Needs the package protobuf.
"""

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any


def _load_when_used(package: str, name: str) -> None:
    """Put a module into `sys.modules` that is loaded when something of it is used."""
    parent = importlib.import_module(package)
    whole = f"{package}.{name}"
    spec = importlib.util.find_spec(whole)
    if whole in sys.modules or spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[whole] = module
    spec.loader.exec_module(module)
    # Without this attribute, `from PACKAGE import NAME` would load the module at once.
    setattr(parent, name, module)


# Protobuf's implementation in C imports the one in Python without using it. That takes half of the
# import's time, for which each start with a store in HDFS would wait.
_load_when_used("google.protobuf.internal", "python_message")

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: E402

Messages = dict[str, tuple[tuple[int, str, str], ...]]
"""Fields of each message as (number, type, name). A "*" before the type means repeated, a "!"
required (proto2 only)."""

LABELS = "map<string, string>"
_Field = descriptor_pb2.FieldDescriptorProto
_LABELS = {"*": _Field.LABEL_REPEATED, "!": _Field.LABEL_REQUIRED}


def describe(
    package: str, messages: Messages, imports: Iterable[str] = (), *, syntax: str = "proto3"
) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a .proto file with `messages`; `syntax` is "proto2" or "proto3"."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"bootseer/{package}.proto", package=package, syntax=syntax, dependency=imports
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for number, kind, field_name in fields:
            _add_field(message, f".{package}.{name}", number, kind, field_name)
    return file


def build(
    files: Iterable[descriptor_pb2.FileDescriptorProto], known: Iterable[Any] = ()
) -> dict[str, Any]:
    """Return the class of each message of `files`, by name.

    `known` lists protobuf's own modules whose messages they use.
    """
    pool = descriptor_pool.DescriptorPool()
    for module in known:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    found = {}
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
        for message in file.message_type:
            described = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            found[message.name] = message_factory.GetMessageClass(described)
    return found


def _add_field(
    message: descriptor_pb2.DescriptorProto, path: str, number: int, kind: str, name: str
) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind == LABELS:
        # protobuf requires this name for the entries of a map.
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, path, 1, "string", "key")
        _add_field(entry, path, 2, "string", "value")
        kind = f"*{path}.{entry.name}"
    if kind[0] in _LABELS:
        field.label = _LABELS[kind[0]]
        kind = kind[1:]
    if kind.startswith("."):
        field.type, field.type_name = _Field.TYPE_MESSAGE, kind
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
