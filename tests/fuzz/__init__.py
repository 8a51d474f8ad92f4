"""Random programs, with packed activations and without: their gradients must agree.

    python -m tests.fuzz --programs 2000 --seed 1      fails with the smallest program, as Python
    python -m tests.fuzz --faults                      plants each fault: its program must fail

Read in this order:
    settings   what surrounds a program: autocast, double backward, how it is packed
    api        vramx's public API, and what stands for it in the run without
    pieces     Functions and operators that vramx does not know, and marks for regions
    writer     a program while it is written: modules, lines, regions
    lines      steps of a line or a few
    grammar    the steps that a program is made of; hypothesis draws them
    run        two steps of training, and their results
    compare    which differences are faults
    directed   programs that are written by hand
    faults     decisions of vramx that are taken wrongly on purpose, and programs that show it
    search     programs until one fails, and then the smallest

A program is Python source from the first, so that what is printed is what ran.
"""
