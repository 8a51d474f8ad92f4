"""Recomputation whose kept inputs are compressed.

    call       checkpoint: one call
    modules    checkpoint_modules: every call of some modules
    inputs     the hooks that pack what a call keeps
    structure  arguments as flat leaves, and back

Not named checkpoint: the module would take the place of the function vramx.checkpoint, whichever of
them is imported first. This file imports nothing.
"""
