"""The /dev/fuse protocol in Python: mount, serve, unmount, without a FUSE library.

`operations.Operations` is what a file system implements, `options.MountOptions` what a mount may
choose. `server.attach` mounts, `server.Server` answers the kernel from threads of this process, and
`unmount` ends a mount from any process; `served.supervision` serves in a worker process that is
replaced when it dies.

Inside: `wire` (bytes), `connection` (what is agreed with the kernel), `mount` and `control`
(mounting, aborting), `dispatch` and `backing` (requests to calls), `request_buffer` and `session`
(threads).
"""
