"""Experts for a device: where each layer's experts are computed, and how their records get there.

experts.py     DeviceExperts: a model's layers on a device; which way a call goes
layer.py       one of them, as its module holds it
slotted.py     layers that the device computes
slots.py       records that lie on the device, and the tables of which do; room.py: how its memory is divided
pinning.py     banks that the device reaches itself
streaming.py   whole layers on their way to the device while the layer before computes
host.py        layers that the host computes for a model on a device
capture.py     whole steps as graphs; split.py, calibrate.py: what of the missing is fetched, what the host computes
usage.py       what is where, for reports
records.py     banks as tensors
"""
