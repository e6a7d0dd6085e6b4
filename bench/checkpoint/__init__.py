"""What the checkpoint cases stand on: capped HDFS clusters, clients of theirs, peers, loaders."""
