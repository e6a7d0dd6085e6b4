"""`java+hdfs://`: HDFS by Hadoop's own client, called by JNI."""
