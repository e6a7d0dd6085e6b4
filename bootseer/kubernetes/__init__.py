"""Programs of Bootseer's own pods: CSI driver, admission webhook, spawner, containerd set-up.

Public: `csi.driver.Driver`, `webhook.server.serve`, `mount_host.Spawner`, and
`containerd_config.install` and `remove`; `api.Api` is the client of the API server.
May import all packages but `cli` and `launch`.
"""
