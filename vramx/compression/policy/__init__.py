"""What is done with a tensor that an operation saves, and what is asked to decide it."""
