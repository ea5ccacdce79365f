"""`python -m cufa`: the command, if its script is not on the path."""

from cufa.cli import main

main(prog_name="cufa")
