"""Warming of directories that Bootseer does not serve, such as an environment on Lustre or NFS.

A start is recorded (names from the kernel's notifications, pages from the page cache); later starts
read the recorded ranges ahead. Needs neither root nor an index. Public: `request`, `plan`,
`reader`, `record`. May import of `prefetch`: nothing.
"""
