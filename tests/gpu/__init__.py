"""torch.cuda's memory interface under vramx, and the same tests under torch's own allocator.

A package, so that its modules may be called what those beside it are called.
"""
