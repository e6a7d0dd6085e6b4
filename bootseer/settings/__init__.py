"""Settings of a command: their table, their sources, and checks of who may set them.

Public: `config` (the table, `load_config`), `values` (parsers of sizes, ages, names), `file` (trust
in the configuration file and in folders). Imports `linux`, `base` and `errors`.
"""
