"""Mutating admission webhook: annotations of a pod become a runtime class, volumes and variables.

`pods` (model) and `plan` are pure; `certificate` and `server` do I/O.
"""
