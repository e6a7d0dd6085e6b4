"""Chains: the lowest layers of an image, named by container engines with one digest.

An engine names the tree of the first N layers by a *chain id*, from which the layers cannot be
derived. So the node that indexes an image publishes a record for each N, whose key is the chain id
(docs/format/image.md). Thread-safe: functions and frozen objects only.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import quote

from msgspec import Meta, Struct

from bootseer.base.documents import Digest, DocumentFormat, Sha256, is_digest
from bootseer.errors import CorruptError, NotFoundError
from bootseer.store import Store


class Chain(Struct, frozen=True):
    """Layers of a chain, from the lowest up."""

    diff_ids: tuple[str, ...]
    index_digest: str = ""
    """Digest of the index of the merged tree; "" until a node has published that index."""


def chain_ids(diff_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the chain ids of an image's first layer, of its first two, and so on. Pure.

    See "Layer ChainID" in the OCI image specification. A chain id of several layers is a SHA-256,
    whichever kind the layers' digests are.
    """
    ids: list[str] = []
    for diff_id in diff_ids:
        if not ids:
            ids.append(diff_id)
        else:
            digest = hashlib.sha256(f"{ids[-1]} {diff_id}".encode("ascii"))
            ids.append(f"sha256:{digest.hexdigest()}")
    return tuple(ids)


def chain_key(chain_id: str) -> str:
    """Return the key of a chain's record."""
    return f"chains/{quote(chain_id, safe='')}.json"


class _ChainRecord(Struct, frozen=True, omit_defaults=True):
    chain_id: Digest
    diff_ids: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=10_000)]
    index_digest: Sha256 | None = None


_FORM: DocumentFormat[_ChainRecord] = DocumentFormat(
    type=_ChainRecord,
    what="the record of a chain of layers",
    kind="bootseer-chain",
    version=1,
    size_max=2 * 2**20,  # 10,000 digests of the longest kind
    checksum_member="checksum",
    indent=1,
)


def encode_chain(chain: Chain) -> bytes:
    """Encode the record of a chain. Deterministic."""
    chain_id = chain_ids(chain.diff_ids)[-1]
    return _FORM.encode(_ChainRecord(chain_id, chain.diff_ids, chain.index_digest or None))


def decode_chain(data: bytes, chain_id: str, where: str) -> Chain:
    """Decode the record of a chain. Raises: UnknownFormatError; CorruptError, also for another."""
    return _chain(_FORM.decode(data, where), chain_id, where)


def _chain(record: _ChainRecord, chain_id: str, where: str) -> Chain:
    if record.chain_id != chain_id or chain_ids(record.diff_ids)[-1] != chain_id:
        raise CorruptError(f"{where}: its layers do not make the chain {chain_id}")
    return Chain(record.diff_ids, record.index_digest or "")


def read_chain(store: Store, chain_id: str) -> Chain | None:
    """Return the chain `chain_id` of the store, or None.

    Raises: CorruptError, also if `chain_id` is not a digest; UnknownFormatError, UnavailableError,
    DeadlineError.
    """
    if not is_digest(chain_id):
        raise CorruptError(f"{chain_id[:100]!r} is no chain id: it is not a digest")
    key = chain_key(chain_id)
    try:
        return _chain(_FORM.read(store, key), chain_id, f"{store.url}/{key}")
    except NotFoundError:
        return None


def publish_chains(store: Store, diff_ids: Sequence[str]) -> None:
    """Publish the chains of an image's layers, whose records are all in the store.

    Raises: UnknownFormatError if a later release wrote one of them; UnavailableError, NoSpaceError.
    """
    for count in range(1, len(diff_ids) + 1):
        _publish(store, Chain(tuple(diff_ids[:count])))


def publish_chain_index(store: Store, diff_ids: Sequence[str], index_digest: str) -> None:
    """Publish the index digest of the merged tree of all these layers; the index is in the store.

    Raises: as `publish_chains`.
    """
    _publish(store, Chain(tuple(diff_ids), index_digest))


def _publish(store: Store, chain: Chain) -> None:
    chain_id = chain_ids(chain.diff_ids)[-1]
    try:
        found = read_chain(store, chain_id)
    except CorruptError:
        found = None
    # A record without an index digest must not replace one that has it.
    if found is None or chain.index_digest not in ("", found.index_digest):
        store.publish(chain_key(chain_id), encode_chain(chain), replace=True)
