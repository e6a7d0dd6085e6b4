"""Making a blob, of a directory or a tar stream: members, frames, the tree."""
