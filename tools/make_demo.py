"""Writes freetoken/demo from the bf16 demo model: experts to nvfp4 in ModelOpt's spelling, everything else unchanged.

python tools/make_demo.py FOLDER_OF_THE_BF16_MODEL
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from freetoken import demo, formats


def main(source: Path) -> None:
    nvfp4 = formats.get("nvfp4")
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = weight
            continue
        matrix = nvfp4.quantize(weight.float().numpy())
        tensors[name] = torch.from_numpy(matrix.codes)
        tensors[f"{name}_scale"] = torch.from_numpy(matrix.scales).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_2"] = torch.tensor(matrix.global_scale)
    target = demo.path()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "ignore": ["lm_head", "model.embed_tokens", "*.self_attn", "*.mlp.gate"],
        "producer": {"name": "freetoken", "version": "0.1.0"},
    }
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
