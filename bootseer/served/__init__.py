"""Processes that serve in the background: their start, folder, control socket, users and end.

Public: `processes.start` and `processes.serve` (both sides of a process), `service` and `ending`
(its folder), `control` (its socket), `users` and `overlays` (mounts over its tree),
`supervision` (replacing dead workers), `status`, `spawner`, `preload`. Imports `bootseer.base`,
`errors`, `linux`, `settings` and `fuse.kernel`; knows no image, snapshot or checkpoint.
"""
