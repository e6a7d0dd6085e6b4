"""What Hadoop's own client needs where `MiniHdfs` runs: its jars, and a quick start."""

from testbed.hdfs.classpath import classpath


def java_client_environment() -> dict[str, str]:
    """To be set before the first use of `java+hdfs://`. Raises: MissingError."""
    return {
        "CLASSPATH": ":".join(map(str, classpath())),
        "LIBHDFS_OPTS": "-Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
