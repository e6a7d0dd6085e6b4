"""Registries: images and artifacts over the OCI distribution protocol.

`open_registry_client` gives a `RegistryClient` of one repository, with the credentials and mirrors
that the node's container engines use. Shared by the launcher's layers; imports none of them.
"""

from bootseer.registry.client import Document, RegistryClient, open_registry_client
from bootseer.registry.reference import Reference, parse_reference

__all__ = ["Document", "Reference", "RegistryClient", "open_registry_client", "parse_reference"]
