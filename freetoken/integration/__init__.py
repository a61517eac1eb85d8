"""Meets transformers: the only part of the library that imports it, and only when a model is loaded.

transformers.py  load: config, dense part and tokenizer by transformers, experts by us
attach.py        the same for a model that is in memory; device.py: either, to a GPU
plan.py          which experts belong to which module, and that nothing of the model is missing
quantizer.py     the hooks into its loader: experts never become parameters, packed dense weights are unpacked
activation.py    which gated activation an experts module applies, found out by trying it
gguf.py          what transformers cannot read from GGUF beside a quantizer: the dense part; the tokenizer
operator.py      the one torch operator through which a model's experts modules call the executor
graph_generate.py, decoding.py, generated.py   model.generate in captured steps
fixed_cache.py, sampling.py   what they run on; compiled.py: through torch.compile
attention.py     a kernel of ours in these steps; topk.py: another
per_layer.py     rows of a table, added into a layer
threads.py       torch's threads while a model loads
hub.py           a local folder for a path or a hub id
generate.py      text from a prompt, timed, for the command line
"""
