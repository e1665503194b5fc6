"""`python -m laya.cli` is the `laya` command."""

from laya.cli.main import main

main()
