"""The /dev/fuse protocol in Python: mount, serve, unmount, without a FUSE library.

Public: `operations.Operations` (the interface of a file system), `options.MountOptions`,
`server.attach` (mounts), `server.FuseServer` (answers the kernel from threads of this process),
`unmount` (ends a mount from any process) and `control`. `served.supervision` serves in a worker
process that is replaced when it dies.

Inside: `wire` (bytes), `connection` (negotiation), `mount`, `dispatch` and `backing` (requests to
calls), `session` (threads). May import `linux`, `base` and `errors`.
"""
