"""Command line `bootseer`: arguments in, one call of a layer below, tables or JSON out.

Public: `main.main` (the program), `command_tree.cli` (its click commands), `grammar` (its tables).
May import every other package of Bootseer; none imports it.
"""
