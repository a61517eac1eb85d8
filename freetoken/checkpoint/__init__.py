"""Checkpoints on disk: what is in them, told from headers, and how experts come out of them.

    safetensors.py   files, headers, tensors: nothing is trusted before it is checked
    quantization.py  what the config says about quantization, in the dialects that exist
    patterns.py      names of modules in configs, and expressions that would match for ever
    scan.py          which tensors make an expert, in which format and spelling (shapes.py: and how wide)
    experts.py       what was found, and reading one expert
    gguf.py          GGUF files: headers, parts, tensors; gguf_config.py: their metadata as a config
    gguf_experts.py  their experts, from blocks
    records.py       a converted folder: experts as records, one file a layer (direct.py: read past the page cache)
    open.py          whichever of these a path names
    load.py          experts into banks, in parallel
    convert.py       writes a converted folder (beside.py: all but the experts)
    export.py        writes a checkpoint for other engines, as compressed-tensors spells it
    journal.py       the unfinished folder of either, and what is finished in it; write.py: its files
    inspect.py       the answer to "what is this, and does it load here?"

To add a spelling of a known format, add it to that format's file; to add a naming of experts, see scan.py; to add a
block type of GGUF, `BLOCKS` in gguf_experts.py; one of its architectures, `ARCHITECTURES` in gguf_config.py.
"""
