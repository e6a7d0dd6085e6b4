"""The server process of a mounted tree: `plan` for the process that starts one, `server` inside.

May import `publish` and the packages below it.
"""
