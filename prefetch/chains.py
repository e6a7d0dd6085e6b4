"""Chains: what container engines call an image's lowest layers, and how the store knows them.

An engine names the tree that the first N layers make by one digest, its *chain id*, from which the
layers cannot be told. So whoever indexes an image leaves a record for each N, under the chain id.
Alone owns chain ids and the record's codec and key (docs/format/image.md). Thread-safe: functions
only.
"""

import hashlib
import json
from collections.abc import Sequence
from urllib.parse import quote

from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch.checked_json import check_digest, digest_in, parse, strings_in
from bootseer.store import Store

VERSION = 1
_KIND = "bootseer-chain"
_LAYER_COUNT_MAX = 10_000
_RECORD_BYTES_MAX = 2 * 2**20
"""10,000 digests of the longest kind."""


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


def encode_chain(diff_ids: Sequence[str]) -> bytes:
    """The record of the chain of these layers, the lowest first. The same layers give the same
    bytes."""
    document = {
        "kind": _KIND,
        "version": VERSION,
        "chain_id": chain_ids(diff_ids)[-1],
        "diff_ids": list(diff_ids),
    }
    return json.dumps(document, indent=1).encode("ascii") + b"\n"


def decode_chain(data: bytes, chain_id: str, where: str) -> tuple[str, ...]:
    """The diff_ids in the record, which do make `chain_id`.

    Raises: CorruptError, UnknownFormatError.
    """
    document = parse(data, _RECORD_BYTES_MAX, where)
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise UnknownFormatError(f"{where} is not a record of the kind {_KIND}")
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
    return diff_ids


def read_chain(store: Store, chain_id: str) -> tuple[str, ...] | None:
    """The diff_ids of a chain, the lowest first; None where the store does not know it.

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
    ids = chain_ids(diff_ids)
    for count, chain_id in enumerate(ids, 1):
        try:
            if read_chain(store, chain_id) is None:
                store.publish(chain_key(chain_id), encode_chain(diff_ids[:count]))
        except CorruptError:
            store.publish(chain_key(chain_id), encode_chain(diff_ids[:count]), replace=True)
