"""Optimizers whose states wait on the host: nothing is imported here before it is asked for."""
