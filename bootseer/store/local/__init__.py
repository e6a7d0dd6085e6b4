"""Backend for a folder of a local or shared file system (`file://`)."""
