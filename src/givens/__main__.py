"""`python -m givens`."""

from givens.cli import main

main()
