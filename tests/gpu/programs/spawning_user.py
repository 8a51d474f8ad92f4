"""A user's script that spawns a child, and knows nothing of vramx: who serves each of the two."""

import json

import torch
import torch.multiprocessing as multiprocessing


def child(answers) -> None:
    total = torch.ones(1000, device="cuda").sum().item()
    answers.put((torch.cuda.get_allocator_backend(), total))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    childs_backend, childs_total = answers.get()
    process.join()
    total = torch.ones(1000, device="cuda").sum().item()
    facts = {
        "backend": torch.cuda.get_allocator_backend(),
        "total": total,
        "childs_backend": childs_backend,
        "childs_total": childs_total,
        "childs_exit_code": process.exitcode,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
