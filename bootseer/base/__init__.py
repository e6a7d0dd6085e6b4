"""Basics that every package uses: documents, digests, redaction, progress bars, request counts.

Each module is used by its own name. They import `bootseer.errors` and one another, nothing else.
"""
