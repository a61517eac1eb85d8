"""Devices: what the orchestrator needs of one (base.py), one without hardware (simulated.py), one of CUDA (cuda.py)."""
