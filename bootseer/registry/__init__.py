"""Registries: images and artifacts over the OCI distribution protocol.

`client.open_registry_client` returns a client of one repository, with the logins and mirrors that
the node's container engines use; `reference` and `documents` are pure and cheap to import. May
import `http`, `transfer` and below.
"""
