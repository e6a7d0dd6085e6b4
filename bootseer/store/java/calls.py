"""Calls of Java methods from Python, by way of JNI: as much of it as a client of HDFS needs.

Owns how values cross over and how an exception of Java becomes one of Python. A `Java` belongs to
one thread and one `with` block; objects are addresses, good until that block ends unless `kept`.
The numbers below are those of the table that the JNI specification fixes (chapter 4, "Interface
Function Table"), so nothing is compiled.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from bootseer.errors import UnsupportedError

_VERSION = 0x00010008
_DETACHED = -2
_Pointer = ctypes.c_void_p
_Int = ctypes.c_int32
# Of the machine: AttachCurrentThreadAsDaemon, GetEnv.
_ATTACH, _GET_ENV = 7, 6
_LOCAL_OBJECTS = 64

_Type = type[Any] | None
_FUNCTIONS: dict[str, tuple[int, _Type, tuple[_Type, ...]]] = {
    "FindClass": (6, _Pointer, (ctypes.c_char_p,)),
    "ExceptionOccurred": (15, _Pointer, ()),
    "ExceptionClear": (17, None, ()),
    "PushLocalFrame": (19, _Int, (_Int,)),
    "PopLocalFrame": (20, _Pointer, (_Pointer,)),
    "NewGlobalRef": (21, _Pointer, (_Pointer,)),
    "DeleteGlobalRef": (22, None, (_Pointer,)),
    "NewObjectA": (30, _Pointer, (_Pointer, _Pointer, _Pointer)),
    "IsInstanceOf": (32, ctypes.c_uint8, (_Pointer, _Pointer)),
    "GetMethodID": (33, _Pointer, (_Pointer, ctypes.c_char_p, ctypes.c_char_p)),
    "CallObjectMethodA": (36, _Pointer, (_Pointer, _Pointer, _Pointer)),
    "CallBooleanMethodA": (39, ctypes.c_uint8, (_Pointer, _Pointer, _Pointer)),
    "CallShortMethodA": (48, ctypes.c_int16, (_Pointer, _Pointer, _Pointer)),
    "CallIntMethodA": (51, _Int, (_Pointer, _Pointer, _Pointer)),
    "CallLongMethodA": (54, ctypes.c_int64, (_Pointer, _Pointer, _Pointer)),
    "CallVoidMethodA": (63, None, (_Pointer, _Pointer, _Pointer)),
    "GetStaticMethodID": (113, _Pointer, (_Pointer, ctypes.c_char_p, ctypes.c_char_p)),
    "CallStaticObjectMethodA": (116, _Pointer, (_Pointer, _Pointer, _Pointer)),
    "NewString": (163, _Pointer, (ctypes.c_char_p, _Int)),
    "GetStringLength": (164, _Int, (_Pointer,)),
    "GetArrayLength": (171, _Int, (_Pointer,)),
    "NewObjectArray": (172, _Pointer, (_Int, _Pointer, _Pointer)),
    "GetObjectArrayElement": (173, _Pointer, (_Pointer, _Int)),
    "SetObjectArrayElement": (174, None, (_Pointer, _Int, _Pointer)),
    "NewByteArray": (176, _Pointer, (_Int,)),
    "GetByteArrayRegion": (200, None, (_Pointer, _Int, _Int, _Pointer)),
    "SetByteArrayRegion": (208, None, (_Pointer, _Int, _Int, _Pointer)),
    "GetStringRegion": (220, None, (_Pointer, _Int, _Int, _Pointer)),
}
_BY_RESULT = {
    "V": "CallVoidMethodA",
    "Z": "CallBooleanMethodA",
    "S": "CallShortMethodA",
    "I": "CallIntMethodA",
    "J": "CallLongMethodA",
    "L": "CallObjectMethodA",
    "[": "CallObjectMethodA",
}


class JavaError(RuntimeError):
    """What a Java method threw; its text begins with the name of the class, without packages."""


class Java:
    """The calling thread's way into the machine at the address `machine`.

    Any method may raise JavaError.
    """

    _functions: ClassVar[dict[str, Any]] = {}
    _classes: ClassVar[dict[str, int]] = {}
    _methods: ClassVar[dict[tuple[str, str, str, str], int]] = {}

    def __init__(self, machine: int) -> None:
        self._environment = _environment(machine)
        if not self._functions:
            table = _table(self._environment)
            found = {
                name: _function(table[number], result, *arguments)
                for name, (number, result, arguments) in _FUNCTIONS.items()
            }
            self._functions.update(found)  # in one step, for other threads

    def __enter__(self) -> Self:
        self._do("PushLocalFrame", _LOCAL_OBJECTS)
        return self

    def __exit__(self, *_: object) -> None:
        self._raw("PopLocalFrame", None)

    def new(self, class_name: str, arguments: str, *values: object) -> int:
        """A new object; `arguments` are the types of the constructor's, as JNI writes them."""
        method = self._method("GetMethodID", class_name, "<init>", f"({arguments})V")
        address: int = self._do("NewObjectA", self.class_of(class_name), method, _values(values))
        return address

    def call(self, target: int, method: str, *values: object) -> Any:
        """The result of a method, which is written as CLASS.NAME(TYPES)TYPE."""
        owner, _, rest = method.partition(".")
        name, parenthesis, types = rest.partition("(")
        identity = self._method("GetMethodID", owner, name, parenthesis + types)
        return self._do(_BY_RESULT[types.rpartition(")")[2][0]], target, identity, _values(values))

    def call_static(self, method: str, *values: object) -> int:
        """As `call`, of a class's own method that returns an object."""
        owner, _, rest = method.partition(".")
        name, parenthesis, types = rest.partition("(")
        identity = self._method("GetStaticMethodID", owner, name, parenthesis + types)
        address: int = self._do(
            "CallStaticObjectMethodA", self.class_of(owner), identity, _values(values)
        )
        return address

    def is_a(self, target: int, class_name: str) -> bool:
        """Whether the object is of that class."""
        return bool(self._do("IsInstanceOf", target, self.class_of(class_name)))

    def text(self, text: str) -> int:
        """A Java string. Raises: UnicodeError for what is no text in any encoding."""
        data = text.encode("utf-16-le")
        address: int = self._do("NewString", data, len(data) // 2)
        return address

    def text_of(self, string: int | None) -> str:
        """What a Java string says; "" for none."""
        if not string:
            return ""
        count = self._raw("GetStringLength", string)
        data = bytearray(2 * count)
        if count:
            self._do("GetStringRegion", string, 0, count, address_of(data))
        return data.decode("utf-16-le", "replace")

    def array(self, class_name: str, items: Sequence[int]) -> int:
        """A Java array of objects."""
        address: int = self._do("NewObjectArray", len(items), self.class_of(class_name), None)
        for index, item in enumerate(items):
            self._do("SetObjectArrayElement", address, index, item)
        return address

    def length(self, array: int) -> int:
        """How much is in a Java array."""
        count: int = self._raw("GetArrayLength", array)
        return count

    def item(self, array: int, index: int) -> int:
        """One object of a Java array."""
        address: int = self._do("GetObjectArrayElement", array, index)
        return address

    def bytes_array(self, size_bytes: int) -> int:
        """A new `byte[]`."""
        address: int = self._do("NewByteArray", size_bytes)
        return address

    def copy_out(self, array: int, count: int, address: int) -> None:
        """Copy the first `count` bytes of a `byte[]` to the memory at `address`."""
        self._do("GetByteArrayRegion", array, 0, count, address)

    def copy_in(self, array: int, count: int, address: int) -> None:
        """Copy `count` bytes from the memory at `address` to the beginning of a `byte[]`."""
        self._do("SetByteArrayRegion", array, 0, count, address)

    def keep(self, target: int) -> int:
        """The object under an address that any thread may use until it is passed to `drop`."""
        address: int = self._do("NewGlobalRef", target)
        return address

    def drop(self, kept: int) -> None:
        """Undo `keep`."""
        self._raw("DeleteGlobalRef", kept)

    def class_of(self, name: str) -> int:
        """The class of that name, with slashes. Raises: JavaError (NoClassDefFoundError)."""
        if name not in self._classes:
            self._classes[name] = self.keep(self._do("FindClass", name.encode()))
        return self._classes[name]

    def _method(self, function: str, class_name: str, name: str, types: str) -> int:
        key = (function, class_name, name, types)
        if key not in self._methods:
            self._methods[key] = self._do(
                function, self.class_of(class_name), name.encode(), types.encode()
            )
        return self._methods[key]

    def _raw(self, function: str, *values: object) -> Any:
        return self._functions[function](self._environment, *values)

    def _do(self, function: str, *values: object) -> Any:
        result = self._raw(function, *values)
        if thrown := self._raw("ExceptionOccurred"):
            self._raw("ExceptionClear")
            raise JavaError(self._told(thrown))
        return result

    def _told(self, thrown: int) -> str:
        try:
            text = self.text_of(self.call(thrown, "java/lang/Object.toString()Ljava/lang/String;"))
        except JavaError:
            return "an exception that cannot say what it is"
        name, colon, message = text.partition(":")
        # One that came from a server is named in parentheses.
        return name.rpartition(".")[2].rstrip(")") + colon + message


def address_of(buffer: bytes | bytearray | memoryview) -> Any:
    """Where the bytes of `buffer` are, for as long as what is returned lives."""
    if isinstance(buffer, bytes):
        return ctypes.c_char_p(buffer)
    return (ctypes.c_char * len(buffer)).from_buffer(buffer)


def _values(values: Sequence[object]) -> Any:
    return (ctypes.c_int64 * max(1, len(values)))(*(value or 0 for value in values))  # type: ignore[misc]


def _table(address: int) -> Any:
    """The functions of a machine or of an environment, each of which begins with their table."""
    return ctypes.cast(address, ctypes.POINTER(ctypes.POINTER(_Pointer)))[0]


def _function(address: int, result: _Type, *arguments: Any) -> Any:
    """One of a table; each is first given what the table belongs to."""
    return ctypes.CFUNCTYPE(result, _Pointer, *arguments)(address)


def _environment(machine: int) -> int:
    """The thread's own; it is made known to the machine first, if it is not."""
    table = _table(machine)
    found = _Pointer()
    where = ctypes.POINTER(_Pointer)
    get = _function(table[_GET_ENV], _Int, where, _Int)
    status = get(machine, ctypes.byref(found), _VERSION)
    if status == _DETACHED:
        # A daemon: the machine's end does not wait for it.
        attach = _function(table[_ATTACH], _Int, where, _Pointer)
        status = attach(machine, ctypes.byref(found), None)
    if status != 0 or not found.value:
        raise UnsupportedError(f"the Java machine takes no calls from this thread ({status})")
    return found.value
