"""Entry point of `python -m calm`, which torchrun uses."""

from calm.cli import main

main()
