"""The HTTP client for registries, web servers, collectors and Kubernetes.

Public: `transport` (requests to one server, and to servers that it redirects to), `ranges` (files
read by ranges), `addresses` (which redirects are allowed). May import `transfer` and below.
"""
