"""Activations kept in fewer bits between forward and backward.

config, random, reference and codec stand below hooks, decorator, offload and graph; each module
says what it is responsible for. This file imports nothing, so that vramx.compression.config costs
no import of torch.
"""
