"""Programs of which `python -m benchmarks.record_traces` records the allocations: plain torch.

Each file is a program as users write them, of another kind than those of the folder above; only its
`Recorder` is ours. Nothing is downloaded: weights and data are random, seeds are fixed. A program
takes 5 to 20 s on an H100. PROGRAM_SIZE=tiny makes it small enough for a processor.
"""
