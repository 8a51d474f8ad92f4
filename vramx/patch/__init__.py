"""The one way in which vramx changes a model, and undoes it.

    change      what is done around the calls of one module or function
    subclass    the class of a changed module, and its record
    module      the changes of a module, recorded on the module itself
    function    the same for functions and for classes of modules
    references  what a callable refers to
    of_classes  what is worked out once of a class, and forgotten with it
    report      restore() and report(), which read the records

The parts that change models (compression, recompute, nn, planning) bring changes of their own; this
one knows none of them. This file imports nothing, so that it costs no import of torch.
"""
