"""A real HDFS for tests and benchmarks: one JVM with a NameNode and several DataNodes."""
