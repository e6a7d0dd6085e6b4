"""Linux system calls and /proc: paths below a root, processes, mounts, locks, file ownership.

Public: the functions and classes of each module; there is no state. Imports only `bootseer.errors`,
`bootseer.base` and the standard library (`grpc_service` also grpcio).
"""
