"""Backend for HDFS (`hdfs://`): by hdfs-native, or by our own protocol code if that is faster."""
