"""Decoding: steps of a model as captured graphs, and the tokens that they give.

    step      the forward pass of one token for each of a few sequences    graph.py
    tail      what makes the next tokens of its logits, and feeds them     graph.py, captured of what it is given
    ring      the tokens, on their way to the host                         ring.py

Nothing here knows transformers: `integration/` brings the forward pass, the sampling and the loop.
"""
