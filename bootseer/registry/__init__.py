"""Registries: images and artifacts over the OCI distribution protocol.

`client.open_registry_client` gives a client of one repository, with the logins and mirrors that
the node's container engines use; `reference` and `documents` are pure and cheap to import. Shared
by the launcher's layers; imports none of them.
"""
