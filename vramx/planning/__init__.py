"""Choosing, block by block, what a model keeps for backward, so that a step fits a budget of bytes.

    plan.py       plan()
    planned.py    Plan
    plan_text.py  what a plan says: text, HTML, code
    chooser.py    what is known of a model, and the choice for a budget
    budget.py     a budget in bytes
    bench.py      measuring a model, and running what was chosen
    measured.py   what was measured
    blocks.py     which modules are the blocks
    words.py      what can be done with a block, and undoing it
    repeats.py    which blocks do the same again, and can be recomputed
    agreement.py  processes that plan together
    steps.py      one step of training on a sample; the state that it must leave as it was
    lightning_step.py  the step of a LightningModule
    caches.py     caches of keys and values, which training has no use for
    loop.py       what a training loop does with gradients, and its optimizers
    states.py     what an optimizer's states and its step take
    meters.py     bytes and milliseconds: of a GPU's allocator, or of storages seen on a host
    storages.py   which storages live: the tracer
    reductions.py what sums of torch take of a GPU beside their results
    trace.py      one step of the whole model: the levels at the blocks' borders
    isolated.py   one block by itself, for each word
    assembly.py   from what was measured to a timeline
    timeline.py   the predicted peak of an arrangement
    choice.py     the fastest arrangement within a budget

The peak of a step that is not run:

    predict.py    predict()
    prediction.py what it returns
    step_programs.py  a step, or the loop around a model
    program.py    what a step refers to, and a copy of it without data
    fake_gpu.py   a GPU that is not there; fake_kernels.py what torch would choose on it,
                  fake_answers.py what torch.cuda and libraries are told of it, fake_device.py
                  what C++ is
    recording.py  what is allocated, and where the program is

The largest batch of a step that is run:

    fit.py        fit_batch()
    batch_fit.py  what it returns
    search.py     which batch is tried next
    states_kept.py  putting a training back as it was
    ranks.py      processes that train together
    device_memory.py  a device's memory, and out of memory

They lie here and not in memory/, which imports no torch: predictions share the tracer, the loop
and the words with plans. timeline.py, choice.py, search.py, batch_fit.py and prediction.py are
arithmetic and import no torch.
"""
