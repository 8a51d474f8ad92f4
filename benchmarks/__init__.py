"""Measurements of vramx, run from the repository's root: `vramx bench NAME`, or `make bench`.

One file a benchmark. Each has DESCRIPTION, `cases(options)` and `measure(case, options)`; the
harness runs every case in a process of its own and appends rows to results/NAME.csv.
"""
