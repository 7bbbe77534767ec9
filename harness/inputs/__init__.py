"""Inputs that people have: a model as it lies on a disk or in a process, a DeepSpeed config, a destination in words."""
