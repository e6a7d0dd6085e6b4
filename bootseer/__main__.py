"""`python -m bootseer` is the command line."""

from bootseer.cli import main

main()
