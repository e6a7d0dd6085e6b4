"""The Java machine of this process, which is started when it is first needed.

Alone owns where Java and Hadoop are looked for, and the options the machine gets. There is one for
the life of a process. It does not survive a fork, so nothing here is done before it is needed: a
process that is forked to serve starts its own. Thread-safe.
"""

import ctypes
import os
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

from bootseer.errors import UnsupportedError
from bootseer.linux.bounded_run import run_within
from bootseer.store.deadline import DeadlineCaller

_VERSION = 0x00010008
_LIBRARIES = ("lib/server", "jre/lib/server", "jre/lib/amd64/server", "jre/lib/aarch64/server")
_CLASS = "org/apache/hadoop/fs/FileSystem.class"
_USUAL_JARS = ("hadoop-common-", "hadoop-client-api-")
_COMMAND_S = 30.0
# Signals are Python's own. No more memory than many streams need: a stream that is written holds
# 5 MiB, a read 1 MiB.
_ALWAYS = ("-Xrs",)
_DEFAULT_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_KERBEROS = "-Djava.security.krb5.conf="
# More parallel calls than any plan of ours makes; a call that is stuck keeps one.
_THREADS_MAX = 128


class _Option(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char_p), ("extra", ctypes.c_void_p))


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int32),
        ("options_count", ctypes.c_int32),
        ("options", ctypes.POINTER(_Option)),
        ("ignores_unknown", ctypes.c_uint8),
    )


class _Process:
    """What is known of the machine here, or was in the process that this one is a copy of."""

    lock = threading.Lock()
    pid = 0
    address = 0
    # Its threads are known to the machine and therefore never end.
    caller: DeadlineCaller | None = None


def _note_fork() -> None:
    _Process.lock = threading.Lock()
    if not _Process.address:
        _Process.caller = None


os.register_at_fork(after_in_child=_note_fork)


def was_started() -> bool:
    """Whether there is a machine here, or was one in the process that this is a copy of."""
    return bool(_Process.address)


def caller() -> DeadlineCaller:
    """The threads from which the machine is to be called.

    Raises: UnsupportedError: this is a copy of a process that has a machine.
    """
    with _Process.lock:
        if _Process.address and _Process.pid != os.getpid():
            raise UnsupportedError(
                "this process was forked from one that runs a Java machine, which a copy cannot "
                "use: start it anew instead (for multiprocessing: the method 'spawn')"
            )
        if _Process.caller is None:
            _Process.caller = DeadlineCaller(_THREADS_MAX, "bootseer-java")
        return _Process.caller


def machine() -> int:
    """The address of the machine, which is started if there is none. From `caller`'s threads.

    Raises: UnsupportedError, with what is missing.
    """
    with _Process.lock:
        if not _Process.address:
            library, jars = _java_library(), _hadoop_jars()
            _Process.address, _Process.pid = _started(library, jars), os.getpid()
        return _Process.address


def _java_library() -> Path:
    home = os.environ.get("JAVA_HOME")
    if not home:
        program = shutil.which("java")
        if program is None:
            raise UnsupportedError(
                "java+hdfs:// needs Java, and there is none: install it (Debian: "
                "openjdk-17-jre-headless), or let JAVA_HOME name its folder"
            )
        home = str(Path(program).resolve().parent.parent)
    for folder in _LIBRARIES:
        library = Path(home) / folder / "libjvm.so"
        if library.is_file():
            return library
    raise UnsupportedError(
        f"java+hdfs:// needs Java's libjvm.so, which is not in {home}/lib/server: let JAVA_HOME "
        "name the folder of a JRE or JDK"
    )


def _hadoop_jars() -> list[str]:
    where = os.environ.get("CLASSPATH") or _asked_hadoop()
    entries: list[str] = []
    for entry in filter(None, where.split(":")):
        # The program `java` does that, not the machine.
        is_folder = entry == "*" or entry.endswith("/*")
        entries += sorted(map(str, Path(entry[:-1]).glob("*.jar"))) if is_folder else [entry]
    if not any(map(_is_usual, entries)) and not any(map(_has_hadoop, entries)):
        raise UnsupportedError(
            "java+hdfs:// needs Hadoop's jars, which CLASSPATH does not name: set it to what "
            "`hadoop classpath --glob` prints, or let HADOOP_HOME name a Hadoop"
        )
    configuration = os.environ.get("HADOOP_CONF_DIR")
    if configuration and configuration not in entries:
        entries.insert(0, configuration)  # which `hadoop classpath` does
    return entries


def _asked_hadoop() -> str:
    """What the program `hadoop` says that its jars are; "" where there is none."""
    home = os.environ.get("HADOOP_HOME")
    program = shutil.which("hadoop", path=f"{home}/bin" if home else None)
    if program is None:
        return ""
    try:
        command = [program, "classpath", "--glob"]
        code, said = run_within(command, _COMMAND_S)
        if code:
            raise subprocess.CalledProcessError(code, command)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnsupportedError(
            f"java+hdfs:// needs Hadoop's jars, and {program} does not name them ({error}): set "
            "CLASSPATH"
        ) from error
    return os.fsdecode(said).strip()


def _is_usual(entry: str) -> bool:
    return os.path.basename(entry).startswith(_USUAL_JARS) and os.path.isfile(entry)


def _has_hadoop(entry: str) -> bool:
    if os.path.isdir(entry):
        return os.path.isfile(f"{entry}/{_CLASS}")
    try:
        with zipfile.ZipFile(entry) as archive:
            return _CLASS in archive.NameToInfo
    except (OSError, zipfile.BadZipFile):
        return False


def _started(library: Path, jars: list[str]) -> int:
    # As for libhdfs, and so for pyarrow.
    given = os.environ.get("LIBHDFS_OPTS", "").split()
    options = [*(given or _DEFAULT_OPTIONS), *_ALWAYS, f"-Djava.class.path={':'.join(jars)}"]
    kerberos = os.environ.get("KRB5_CONFIG")
    if kerberos and not any(option.startswith(_KERBEROS) for option in given):
        options.append(_KERBEROS + kerberos)  # Java does not know the variable
    array = (_Option * len(options))(*(_Option(os.fsencode(text), None) for text in options))
    arguments = _Arguments(_VERSION, len(options), array, 0)
    found, environment = ctypes.c_void_p(), ctypes.c_void_p()
    count = ctypes.c_int32()
    try:
        loaded = ctypes.CDLL(str(library))
        start, list_started = loaded.JNI_CreateJavaVM, loaded.JNI_GetCreatedJavaVMs
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"java+hdfs:// cannot load {library}: {error}") from error
    # The machine of another library, for example pyarrow's: a process can have but one.
    list_started(ctypes.byref(found), 1, ctypes.byref(count))
    if count.value and found.value:
        return found.value
    status = start(ctypes.byref(found), ctypes.byref(environment), ctypes.byref(arguments))
    if status != 0 or not found.value:
        raise UnsupportedError(
            f"the Java machine of {library} does not start (error {status}): see LIBHDFS_OPTS, "
            "whose options it gets"
        )
    return found.value
