"""Host work inside a replayed step that cannot deadlock.

    launching thread            worker                     device
    post duties ------------->  wakes
    launch graph -------------------------------------->   begins
                                            <-- bell ---   layer's input is there
                                does the work
                                --- answer -------------->  waits for it, takes it, goes on
    wait: polls `finished`  <---------------------------   ends

duty.py what is to be done; worker.h and _worker.pyx who does it, gate.h their team; steps.py the order, failure and
recovery; watchdog.py what happens when something is late; _layer.pyx experts as a duty; rows.py rows of a table as one.
"""

from freetoken.duties._worker import Line, TeamWork, Worker
from freetoken.duties.duty import Duty
from freetoken.duties.steps import StepGraph, Steps

__all__ = ["Duty", "Line", "StepGraph", "Steps", "TeamWork", "Worker"]
