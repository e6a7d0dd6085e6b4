"""`hdfs://`: HDFS by hdfs-native, and past it where that is slow or lacks something."""
