"""Joins files of an HDFS into one without copying: `concat`, which hdfs-native does not offer."""

from collections.abc import Sequence

from bootseer.errors import UnsupportedError
from bootseer.store.hdfs.errors import translate
from bootseer.store.hdfs.rpc.calls import NameNode
from bootseer.store.hdfs.rpc.frames import RpcError


def join_files(name_node: NameNode | None, target: str, sources: Sequence[str], what: str) -> None:
    """Absolute paths; `what` is for messages. Raises: errors of `bootseer.errors`."""
    if name_node is None:
        raise UnsupportedError(f"cannot {what}: the NameNode takes no calls from us")
    try:
        name_node.concat(target, sources)
    except RpcError as error:
        text = str(error)
        if "FileNotFoundException" in text:
            raise translate(FileNotFoundError(text), what) from error
        raise translate(RuntimeError(text), what) from error
    except (ConnectionError, TimeoutError) as error:
        raise translate(error, what) from error
