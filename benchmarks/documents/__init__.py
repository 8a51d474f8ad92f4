"""What is made in README.md and docs/: tables and figures, help texts, the map of vramx.

    python -m benchmarks.documents --check       say what is not as it would be made; exits 1
    python -m benchmarks.documents --write       make it
    python -m benchmarks.documents --prune       drop the rows of runs that no table shows

Made text stands between two comments of a page. The first says what it is:
    <!-- table NAME -->                          a table of tables.ini, with where it was measured
    <!-- = NAME: CASE: METRIC: FORMAT -->        one figure of that table's run, as in figures.py
    <!-- help VERB -->                           what `vramx VERB --help` prints
    <!-- explain -->                             what `vramx explain` prints of a recorded failure
    <!-- map -->                                 the files of vramx/, a line each
    <!-- recipe NAME -->                         what the variants of a recipe took
    <!-- recipes -->                             the pages of docs/recipes
and <!-- end --> ends it. `results` reads the raw rows and chooses the run, `tables` says which
tables there are, `figures` reads one of their figures, `made` makes text, `pages` finds it in the
pages, `prune` drops rows, `pictures` draws, and `claims` is what `vramx bench all` compares with.
"""
