"""Real training on CPU torch whose tensors live in the allocator's core, on a simulated device."""
