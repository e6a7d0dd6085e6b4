"""Parts of the checkpoint cases: rate-limited HDFS clusters, their clients, peers and loaders."""
