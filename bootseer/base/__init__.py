"""The ground floor: documents, digests and texts that every package uses.

Nothing here imports more of Bootseer than `bootseer.errors`.
"""
