"""Programs of which `python -m benchmarks.record_traces` records the allocations: plain torch.

Each file is a program as users write them, of another kind than those of the folder above; only its
`Recorder` is ours. Nothing is downloaded: weights and data are random, seeds are fixed. Each has up
to 50,000 allocations, in some seconds on an H100. PROGRAM_SIZE=tiny makes it small enough for a
processor.
"""
