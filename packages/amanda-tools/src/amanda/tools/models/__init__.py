"""Models by name, with inputs of their own, for `amanda run flops hf:llama`.

| word | model |
|---|---|
| `hf:llama`, `hf:llama:num_hidden_layers=2` | a type of transformers, its configuration changed or not |
| `hf:FOLDER/config.json` | the model of a configuration's file |
| `hf:FOLDER`, `hf:organisation/name` | of a checkpoint, in a folder or in the cache of the Hugging Face hub |
| `timm:resnet50` | of timm |
| `torch:package.module:factory`, `torch:FILE.py:factory` | what it returns: a module, or (module, inputs) |
| `keras:MobileNetV2`, `keras:FILE.keras` | of keras.applications, or of a file |
| `onnx:FILE`, `FILE.onnx` | an ONNX model in ONNX Runtime |

Weights are random, except those of files and checkpoints: nothing is downloaded.
"""

from amanda.tools.models._subject import KINDS, Input, ModelError, Subject, is_model, made

__all__ = ["KINDS", "Input", "ModelError", "Subject", "is_model", "made"]
