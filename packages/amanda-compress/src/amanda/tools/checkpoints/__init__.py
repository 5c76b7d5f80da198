"""Save and load pruned and quantised PyTorch models: safetensors, and a file of what was done to the model.

result = convert(model, gptq)
save_compressed(model, "folder", result)

model = Model()  # as it was before
load_compressed(model, "folder")
"""

from amanda.tools.checkpoints._checkpoint import Checkpoint, load_compressed, save_compressed

__all__ = ["Checkpoint", "load_compressed", "save_compressed"]
