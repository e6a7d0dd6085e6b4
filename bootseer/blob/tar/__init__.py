"""Tar streams: headers, sparse files, and a strict reader."""
