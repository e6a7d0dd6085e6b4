"""The mutating webhook: annotations of a pod become its runtime class, volumes and variables.

pods, identity, plan and review are pure; cluster, credentials, server and process are the edge.
"""
