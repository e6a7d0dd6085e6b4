"""Trees that are not ours: record what a start touches below a directory, read it ahead next time.

For an environment on Lustre or NFS, or an image that another snapshotter serves. Needs neither root
nor an index: names come from the kernel's notifications, pages from the page cache.
"""
