"""Messages of Protocol Buffers that are described here, without generated code.

They are built in a pool of their own: nothing generated has to fit the installed protobuf, and no
other user of the same messages in one process is disturbed. Field numbers never change, and unknown
fields are skipped. Whoever imports this needs the package protobuf.
"""

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Messages = dict[str, tuple[tuple[int, str, str], ...]]
"""The (number, type, name) of each field of each message. Before a type: "*" repeated, "!" required
(proto2 alone has such fields)."""

LABELS = "map<string, string>"
_Field = descriptor_pb2.FieldDescriptorProto
_LABELS = {"*": _Field.LABEL_REPEATED, "!": _Field.LABEL_REQUIRED}


def describe(
    package: str, messages: Messages, imports: Iterable[str] = (), *, syntax: str = "proto3"
) -> descriptor_pb2.FileDescriptorProto:
    """Return the messages as protobuf describes a file of them; `syntax`: "proto2" or "proto3"."""
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
    """The class of each message of `files`, by its name; `known`: modules of protobuf's own
    messages that these use."""
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
        # The name that protobuf itself gives to a map's entries.
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
