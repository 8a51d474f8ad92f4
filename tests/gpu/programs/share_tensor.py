"""Shares tensors of the GPU with a spawned child, from ordinary memory and from a MemPool.

    share_tensor.py native|vramx

The child adds up what it gets and doubles it in place; the parent looks at the result.
"""

import json
import sys

import torch
import torch.multiprocessing as multiprocessing

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

COUNT = 1 << 22


def child(tensors, answers) -> None:
    while True:
        try:
            tensor = tensors.get()
            if tensor is None:
                return
            total = tensor.sum().item()
            tensor.mul_(2)
            torch.cuda.synchronize()
            del tensor
            answers.put(total)
        except RuntimeError as error:
            answers.put(str(error))


def share(tensor: torch.Tensor, tensors, answers) -> dict:
    try:
        tensors.put(tensor)
    except RuntimeError as error:
        return {"error": str(error)}
    answer = answers.get()
    torch.cuda.synchronize()
    if isinstance(answer, str):
        return {"error": answer}
    return {"total": answer, "doubled": tensor.sum().item()}


def main() -> None:
    context = multiprocessing.get_context("spawn")
    tensors, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=child, args=(tensors, answers))
    process.start()
    ordinary = torch.ones(COUNT, device="cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.ones(COUNT, device="cuda")
    facts = {
        "ordinary": share(ordinary, tensors, answers),
        "pooled": share(pooled, tensors, answers),
    }
    tensors.put(None)
    process.join()
    facts["childs_exit_code"] = process.exitcode
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
