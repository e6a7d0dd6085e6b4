"""What Bootseer's own pods run on a cluster: the process under which the servers of mounts live,
the CSI driver, the webhook; and a client of the API server."""
