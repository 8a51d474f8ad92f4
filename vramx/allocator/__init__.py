"""The allocator behind torch: installing it, asking it, bounding it.

    install      install_allocator, allocator_installed
    options      what can be chosen, checked before anything is done
    cuda_init    who initialises CUDA, and being there just before
    torch_facts  the installed torch, without importing it
    toolchain    compiler and headers for the shim
    shim_cache   where built shims are kept, and whose are trusted
    shim_build   the shim compiled for the installed torch
    shim         the built shim, loaded
    plain        what is left without a shim
    stats        allocator_stats
    limits       set_limit, defragment
    watching     what is watched whoever serves: failures, the history, peaks
    peaks        what was held at most, into a file when the process ends
    oom_snapshot   a snapshot of a request that failed, when it fails
    oom_document   what that snapshot says
    exit_stats   statistics into a file when the process ends

Importing this costs nothing; each module is imported by whoever needs it. torch is imported by
install_allocator and not before.
"""
