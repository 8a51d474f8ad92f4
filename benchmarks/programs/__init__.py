"""Training programs as users write them, for benchmarks/torch_programs.py to run unmodified.

A file whose name starts with a letter is a program; none of them names an allocator. What they
share is in `_models`, `_report` and `_turn`. `_cases`, `_launch` and `_verdicts` are the side that
runs them, and `_calls` is what benchmarks/torch_calls.py runs in the same way.
By hand, from the root of the checkout, on a GPU or small on a processor:

    PYTHONPATH=. python benchmarks/programs/llama_varlen.py
    PROGRAM_SIZE=tiny PYTHONPATH=. python benchmarks/programs/llama_varlen.py
"""
