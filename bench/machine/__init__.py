"""The machine that is measured: its description, disks, page cache and processes."""
