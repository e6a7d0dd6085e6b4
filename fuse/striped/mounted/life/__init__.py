"""The life of a mount: begun, supervised, restarted, asked, ended."""
