"""Choosing, block by block, what a model keeps for backward, so that a step fits a budget of bytes.

    plan.py       plan() and Plan
    budget.py     a budget in bytes
    bench.py      measuring a model, and running what was chosen
    blocks.py     which modules are the repeated blocks
    words.py      what can be done with a block, and undoing it
    steps.py      one step of training on a sample; the state that it must leave as it was
    loop.py       what a training loop does with gradients, and its optimizers
    states.py     what an optimizer's states and its step take
    meters.py     bytes and milliseconds: of a GPU's allocator, or of storages seen on a host
    trace.py      one step of the whole model: the levels at the blocks' borders
    isolated.py   one block by itself, for each word
    assembly.py   from what was measured to a timeline
    timeline.py   the predicted peak of an arrangement
    choice.py     the fastest arrangement within a budget

timeline.py and choice.py are arithmetic and import no torch.
"""
