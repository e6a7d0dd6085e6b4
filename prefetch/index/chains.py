"""Chains: what container engines call an image's lowest layers, and how the store knows them.

An engine names the tree that the first N layers make by one digest, its *chain id*, from which the
layers cannot be told. So whoever indexes an image leaves a record for each N, under the chain id.
Alone owns chain ids and the record's codec and key (docs/format/image.md). Thread-safe: functions
and frozen objects only.
"""

import hashlib
import json
from collections.abc import Sequence
from urllib.parse import quote

from msgspec import Struct

from bootseer.checked_json import (
    SHA256,
    check_checksum,
    check_digest,
    digest_in,
    parse,
    strings_in,
    with_checksum,
)
from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError
from bootseer.store import Store

VERSION = 1
_KIND = "bootseer-chain"
_LAYER_COUNT_MAX = 10_000
_RECORD_BYTES_MAX = 2 * 2**20
"""10,000 digests of the longest kind."""


class Chain(Struct, frozen=True):
    """The layers of a chain, the lowest first."""

    diff_ids: tuple[str, ...]
    index_digest: str = ""
    """Of their merged tree, where somebody has published that."""


def chain_ids(diff_ids: Sequence[str]) -> tuple[str, ...]:
    """The chain ids of an image's first layer, of its first two, and so on ("Layer ChainID" in
    the OCI image specification; SHA-256 whatever the layers' digests are). Pure."""
    ids: list[str] = []
    for diff_id in diff_ids:
        if not ids:
            ids.append(diff_id)
        else:
            digest = hashlib.sha256(f"{ids[-1]} {diff_id}".encode("ascii"))
            ids.append(f"sha256:{digest.hexdigest()}")
    return tuple(ids)


def chain_key(chain_id: str) -> str:
    """Where the record of a chain lies."""
    return f"chains/{quote(chain_id, safe='')}.json"


def encode_chain(chain: Chain) -> bytes:
    """The record of a chain. The same one gives the same bytes."""
    document = {
        "kind": _KIND,
        "version": VERSION,
        "chain_id": chain_ids(chain.diff_ids)[-1],
        "diff_ids": list(chain.diff_ids),
    }
    if chain.index_digest:
        document["index_digest"] = chain.index_digest
    return json.dumps(with_checksum(document), indent=1).encode("ascii") + b"\n"


def decode_chain(data: bytes, chain_id: str, where: str) -> Chain:
    """The chain in the record, whose layers do make `chain_id`.

    Raises: CorruptError, UnknownFormatError.
    """
    document = parse(data, _RECORD_BYTES_MAX, where)
    check_checksum(document, where)
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise CorruptError(f"{where} is not a record of the kind {_KIND}")
    if document.get("version") != VERSION:
        version = str(document.get("version"))[:20]
        raise UnknownFormatError(
            f"{where} has version {version}; this release reads version {VERSION}: use a newer one"
        )
    diff_ids = strings_in(document, "diff_ids", _LAYER_COUNT_MAX, where)
    for diff_id in diff_ids:
        check_digest(diff_id, where)
    named = digest_in(document, "chain_id", where)
    if not diff_ids or named != chain_id or chain_ids(diff_ids)[-1] != chain_id:
        raise CorruptError(f"{where}: its layers do not make the chain {chain_id}")
    index_digest = ""
    if document.get("index_digest") is not None:
        index_digest = digest_in(document, "index_digest", where, SHA256)
    return Chain(diff_ids, index_digest)


def read_chain(store: Store, chain_id: str) -> Chain | None:
    """What the store knows of a chain; None where that is nothing.

    Raises: CorruptError (also where `chain_id` is no digest), UnknownFormatError,
    UnavailableError, DeadlineError.
    """
    check_digest(chain_id, "the chain id")
    key = chain_key(chain_id)
    try:
        data = store.read(key, 0, _RECORD_BYTES_MAX + 1)
    except NotFoundError:
        return None
    return decode_chain(data, chain_id, f"{store.url}/{key}")


def publish_chains(store: Store, diff_ids: Sequence[str]) -> None:
    """Make the chains of an image's layers known, whose records are all in the store.

    Raises: UnknownFormatError where a later release wrote one; UnavailableError, NoSpaceError.
    """
    for count in range(1, len(diff_ids) + 1):
        _publish(store, Chain(tuple(diff_ids[:count])))


def publish_chain_index(store: Store, diff_ids: Sequence[str], index_digest: str) -> None:
    """Make known what index, which is in the store, the merged tree of all these layers has.

    Raises: as `publish_chains`.
    """
    _publish(store, Chain(tuple(diff_ids), index_digest))


def _publish(store: Store, chain: Chain) -> None:
    """Unless what is there says as much."""
    chain_id = chain_ids(chain.diff_ids)[-1]
    try:
        found = read_chain(store, chain_id)
    except CorruptError:
        found = None
    if found is None or chain.index_digest not in ("", found.index_digest):
        store.publish(chain_key(chain_id), encode_chain(chain), replace=True)
