"""The machine that is measured: its description, disks and page cache."""
