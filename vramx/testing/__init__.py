"""What tests of programs use: marks of pytest for GPU memory.

    plugin   what pytest loads by its entry point: the marks, their arguments
    hooks    what is measured around a test that has one

pytest loads the plugin wherever vramx is installed, so it imports neither torch nor numpy, and
looks at nothing but the marks of the tests.
"""
