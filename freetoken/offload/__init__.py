"""Experts in slots of a device: how many each layer gets, and what lies where."""
