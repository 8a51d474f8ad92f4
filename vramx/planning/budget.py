"""A budget as a caller writes it, in bytes of the device that a model is on. Pure."""

from __future__ import annotations

import torch
from torch import nn

from vramx.errors import InvalidValueError, brief
from vramx.sizes import parse_size

Budget = int | str | float | None
SMALLEST = "smallest"


def budget_bytes_of(budget: Budget, device: torch.device) -> int | None:
    """Return a budget in bytes; None where it names none.

    Raises:
        InvalidValueError: it is not accepted on this device.
    """
    if budget is None or budget == SMALLEST:
        return None
    if not isinstance(budget, float):
        return parse_size(budget)
    if device.type != "cuda" or not 0 < budget <= 1:
        raise InvalidValueError(
            f"budget {brief(budget)} is not accepted on {device.type}; accepted are bytes, text "
            "such as 24GiB, and on a GPU the fraction of its memory, above 0.0 and up to 1.0"
        )
    return int(budget * torch.cuda.get_device_properties(device).total_memory)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model; raise unless it is one."""
    devices = {parameter.device for parameter in model.parameters()}
    if not devices:
        raise InvalidValueError(f"{type(model).__name__} has no parameters: it does not learn")
    if len(devices) != 1:
        raise InvalidValueError(
            f"the model's parameters are on {sorted(map(str, devices))}; accepted is one device"
        )
    return devices.pop()
