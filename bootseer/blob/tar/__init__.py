"""Tar streams: headers, sparse files, a strict reader, and decompression of archives."""
