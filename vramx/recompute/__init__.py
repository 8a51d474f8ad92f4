"""Recomputation whose kept inputs are compressed.

    call       checkpoint: one call
    modules    checkpoint_modules: every call of some modules
    again      what a region saves, made again without torch's checkpoint
    region     the function as torch calls it: first, and to recompute
    inputs     the hooks that pack what a call keeps
    watch      what runs in a region: whether packing its input is safe
    smooth     the operations under which it is
    verdicts   what watched calls have shown
    objects    arguments that change, such as caches, as they were
    buffers    tensors of modules that change, as they were
    hooks      forward hooks of modules, and what they reach
    modes      modes and switches of torch around the call
    ending     where a recomputation ends
    structure  arguments as flat leaves, and back

Not named checkpoint: the module would take the place of the function vramx.checkpoint, whichever of
them is imported first. This file imports nothing.
"""
