"""The `vramx` command: one module a verb, each with add_parser(subparsers) and run(args) -> int.

The only part of the package that prints. Results go to stdout, everything else to stderr.
"""
