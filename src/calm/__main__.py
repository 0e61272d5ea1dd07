"""`python -m calm`, which is how torchrun starts a command."""

from calm.cli import main

main()
